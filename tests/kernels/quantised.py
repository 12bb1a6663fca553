"""Quantised matrices for tests of `linear` and `embedding`: packed, run on an instruction set, and
the arithmetic of their activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_core.weights.tensor import RawTensor
from vllmx_cpu.native import Isa
from vllmx_cpu.packing import PackedMatrix, load_weights, matrix_shapes
from vllmx_cpu.structs import (
    ACTIVATIONS,
    NO_ACTIVATION,
    VxElementwise,
    VxEmbedding,
    VxLinear,
    VxStep,
)

RunOp = Callable[..., None]
MAX_ROWS = 300


@dataclass
class Source:
    """Parts by name."""

    parts: dict[str, WeightPart]

    def names(self) -> list[str]:
        return list(self.parts)

    def part(self, name: str) -> WeightPart:
        return self.parts[name]

    def close(self) -> None: ...


def dense_part(name: str, values: F32) -> WeightPart:
    raw = RawTensor(name, "f32", values.shape, values.view(np.uint8).reshape(-1))
    return StoredPart(name, values.shape, DENSE, {"weight": raw})


@dataclass
class Case:
    """A packed matrix and the part it was made of."""

    kind: str
    part: WeightPart
    bias: F32
    matrix: PackedMatrix
    panels: AnyArray = field(repr=False)

    def run(
        self,
        run_op: RunOp,
        isa: Isa,
        x: F32,
        *,
        threads: int = 2,
        activation: str | None = None,
        rows: I32 | None = None,
    ) -> F32:
        count = len(x) if rows is None else len(rows)
        width = self.part.shape[0] // (2 if activation else 1)
        y = np.full((count + 1, width), 7.0, np.float32)
        arguments = VxLinear(
            self.matrix.struct(),
            x.ctypes.data,
            y.ctypes.data,
            self.panels.ctypes.data,
            NO_ACTIVATION if activation is None else ACTIVATIONS[activation],
            int(rows is not None),
            0.0,
            0,
        )
        step = VxStep(T=len(x))
        if rows is not None:
            step.L, step.logit_rows = count, rows.ctypes.data
        run_op(isa, "linear", arguments, step, threads)
        np.testing.assert_array_equal(y[count], 7.0)  # nothing beyond the last row
        return y[:count]


def pack_case(part: WeightPart, *, gated: bool = False) -> Case:
    """The part with a bias, in the kind that the backend chooses for it."""
    n, k = part.shape
    bias = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    source = Source({"w": part, "b": dense_part("b", bias)})
    spec = WeightSpec("w", "linear", (PartSpec("w", n, "b"),), k)
    shapes = matrix_shapes([spec], "bf16", {"w"} if gated else (), source)
    loaded = load_weights([spec], {}, source, shapes, num_threads=2, progress=False)
    panels = np.empty(MAX_ROWS * (k // 256 + 1) * 256, np.float32)
    return Case(shapes["w"].kind, part, bias, loaded.matrices["w"], panels)


def embedding_rows(part: WeightPart, run_op: RunOp, isa: Isa, ids: I32) -> F32:
    """Rows of the part as a packed table."""
    rows, cols = part.shape
    spec, source = WeightSpec("w", "embedding", (PartSpec("w", rows),), cols), Source({"w": part})
    shapes = matrix_shapes([spec], "bf16", (), source)
    loaded = load_weights([spec], {}, source, shapes, num_threads=1, progress=False)
    y = np.full((len(ids) + 1, cols), 7.0, np.float32)
    step = VxStep(T=len(ids), tokens=ids.ctypes.data)
    run_op(isa, "embedding", VxEmbedding(loaded.matrices["w"].struct(), y.ctypes.data), step, 2)
    np.testing.assert_array_equal(y[len(ids)], 7.0)
    return y[: len(ids)]


def check_batches(case: Case, run_op: RunOp, isa: Isa) -> None:
    """A row's bits do not depend on the rows beside it, nor on the threads."""
    n, k = case.part.shape
    x = inputs(MAX_ROWS, k)
    alone = np.concatenate([case.run(run_op, isa, x[i : i + 1], threads=1) for i in range(70)])
    random = np.random.default_rng(n)
    for rows in (*range(1, 15), *random.integers(15, 71, 8)):
        first = int(random.integers(0, 71 - rows))
        threads = int(random.choice([1, 2, 5]))
        got = case.run(run_op, isa, np.ascontiguousarray(x[first : first + rows]), threads=threads)
        np.testing.assert_array_equal(got, alone[first : first + rows], err_msg=f"{rows} rows")
    np.testing.assert_array_equal(case.run(run_op, isa, x)[:70], alone)


def check_gate(part: WeightPart, run_op: RunOp, isa: Isa) -> None:
    """A fused gate gives the bits of two ops."""
    features = part.shape[0] // 2
    case, x = pack_case(part, gated=True), inputs(5, part.shape[1])
    gate_up = pack_case(part).run(run_op, isa, x)
    np.testing.assert_array_equal(case.run(run_op, isa, x), gate_up)
    apart = np.empty((5, features), np.float32)
    arguments = VxElementwise(
        x=gate_up.ctypes.data, y=apart.ctypes.data, width=features, activation=ACTIVATIONS["silu"]
    )
    run_op(isa, "gated_act", arguments, VxStep(T=5), 2)
    np.testing.assert_array_equal(case.run(run_op, isa, x, activation="silu"), apart)


def inputs(rows: int, k: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def rounded(x: F32, width: int) -> tuple[npt.NDArray[np.int64], F32]:
    """(T, units, width) int8 activations and their scales (T, units)."""
    units = x.reshape(len(x), -1, width)
    largest = np.abs(units).max(axis=2)
    factor = np.where(largest > 0, np.float32(127) / np.maximum(largest, 1e-30), np.float32(0))
    codes = np.rint(units * factor[:, :, None].astype(np.float32)).astype(np.int64)
    return codes, largest / np.float32(127)


def fma(a: F32, b: F32, c: F32, fused: bool) -> F32:
    """a * b + c, rounded once or twice."""
    if not fused:
        return a * b + c
    total: F32 = (a.astype(np.float64) * b + c).astype(np.float32)
    return total
