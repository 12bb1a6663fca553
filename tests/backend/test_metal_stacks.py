"""Stacks of quantised matrices on MLX: multiplied as they are stored, chosen by index."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_testing.synthetic import ArraySource

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal.matrices import DenseMatrix, LinearWeight, QuantisedMatrix  # noqa: E402
from vllmx_metal.matrices import StackedMatrix as Parts  # noqa: E402
from vllmx_metal.weights import WeightLoader, held_bytes, planned_bytes  # noqa: E402

from .test_metal_weights import gguf_part  # noqa: E402

COUNT, ROWS, COLS = 3, 8, 256


class Source(ArraySource):
    """A part for each name."""

    def __init__(self, parts: dict[str, WeightPart]) -> None:
        super().__init__({})
        self._parts = parts


def part(kind: str) -> WeightPart:
    made = gguf_part(kind, ROWS, COLS)
    if kind == "MXFP4":
        exponents = made.buffers["weight"].data.reshape(-1, 17)[:, 0]
        exponents[:] = 120 + exponents % 6
    return made


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("kinds", "held"),
    [
        ("Q4_K Q4_K", QuantisedMatrix),
        ("Q8_0 Q8_0", QuantisedMatrix),
        ("MXFP4 MXFP4", QuantisedMatrix),
        ("Q4_K Q6_K", Parts),
        ("Q4_K Q8_0 Q8_0 Q4_K Q4_K Q8_0", DenseMatrix),
    ],
)
def test_rows_are_multiplied_by_the_matrix_of_their_index(
    kinds: str, held: type, ordered: bool
) -> None:
    names = kinds.split() if len(kinds.split()) == 2 * COUNT else kinds.split() * COUNT
    parts = {f"w{index}": part(kind) for index, kind in enumerate(names)}
    spec = WeightSpec(
        "s", "stack", tuple(PartSpec(name, ROWS) for name in parts), COLS, count=COUNT
    )
    source = Source(parts)
    weight = WeightLoader(source, mx.float32).load([spec], {}, progress=False)["s"]
    assert isinstance(weight, LinearWeight)
    matrix = weight.matrix
    assert isinstance(matrix, held)
    assert held_bytes({"s": weight}) <= planned_bytes([spec], {}, source, mx.float32)

    ids = np.array([0, 1, 1, 2] if ordered else [2, 0, 1, 0], np.int32)
    x = np.random.default_rng(5).standard_normal((4, 1, COLS)).astype(np.float32)
    got = np.array(weight.multiply_each(mx.array(x), mx.array(ids), ordered=ordered))
    dense = np.stack([part.dequantize() for part in parts.values()]).reshape(COUNT, -1, COLS)
    expected = np.einsum("tic,trc->tir", x, dense[ids])
    np.testing.assert_allclose(got, expected, atol=1e-2 * np.abs(expected).max())
