"""Products of few tokens that take in a residual, a norm or a gate, next to separate launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, vector_width
from vllmx_cuda.kernel_specs.rows import GATES
from vllmx_cuda.kernel_specs.types import PLAIN
from vllmx_cuda.kernel_specs.w4 import MINIMA, ZERO_CODES, ZERO_MIDDLE, folds
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import (
    NOTHING_FUSED,
    Array,
    assert_near,
    inout,
    normal,
    on_device,
    options,
    wide,
)
from .test_cuda_codes8 import as_stored
from .test_cuda_w4 import random_weights

F16 = DTYPES["f16"]
INTEGERS = {  # bits, zero, group
    "w4": (4, ZERO_CODES, 128),
    "q4_k": (4, MINIMA, 32),
    "q8": (8, ZERO_MIDDLE, 32),
    "q6_k": (6, ZERO_MIDDLE, 16),
}


@dataclass(frozen=True)
class Matrix:
    """A matrix in the memory of a kernel."""

    entry: str
    rows: int
    """Outputs of one tile of rows."""
    weights: list[Array]
    layout: list[int]
    options: dict[str, int]
    shape: tuple[int, int]


def matrix(form: str, shape: tuple[int, int], dtype: str) -> Matrix:
    rng, (outputs, inputs) = np.random.default_rng(shape[1]), shape
    if form == "dense":
        return Matrix("linear_mma", 8, [normal(rng, shape, dtype, 0.1)], [], {}, shape)
    if form == "fp8":
        codes = rng.integers(0, 127, shape) | rng.choice([0, 128], shape)
        scales = on_device(rng.uniform(0.5, 2, (outputs, 1)) / 3000, np.float32)
        weights = [on_device(codes, np.uint8), as_stored(scales, (1, inputs))]
        return Matrix("codes8_mma", 16, weights, [1, 31], {}, shape)
    bits, zero, group = INTEGERS[form]
    w = random_weights(rng, shape, bits, F16, zero, group)
    more = {**w.form.options, "VX_FOLDS": folds(w.form.group_shift)}
    return Matrix("w4_linear", 16, [w.data], [w.form.group_shift], more, shape)


def multiply(
    emulator: Emulator,
    w: Matrix,
    x: Array,
    y: Array,
    dtype: str,
    *,
    bias: Array | None = None,
    tiles: int = 1,
    rows: int = 2,
    parts: int = 1,
    fused: tuple[Any, ...] = NOTHING_FUSED,
    **fusions: int,
) -> None:
    tokens, (outputs, inputs) = len(x), w.shape
    if fusions.get("VX_GATED"):
        outputs //= 2
    partial = empty((parts, tokens, outputs), np.float32) if parts > 1 else None
    arrivals = inout(np.zeros(-(-outputs // 8) * 2), np.uint32) if parts > 1 else None
    chosen = {**w.options, **PLAIN, **fusions}
    variant = KERNELS[w.entry].variant(
        **options(dtype, VX_TILES=tiles, VX_ROWS=rows, VX_OUT=0, **chosen)
    )
    sizes = {"tokens": tokens, "outputs": outputs, "width": inputs, "splits": parts}
    shape = (tokens, outputs, inputs, y.shape[1], *w.layout)
    emulator.launch(variant, sizes, [x, *w.weights, bias, y, partial, arrivals, *shape, *fused])


RESIDUAL = [  # form, dtype, tokens, outputs, inputs, tiles, rows, splits
    ("dense", "bf16", 1, 40, 96, 1, 1, 1),
    ("dense", "f16", 9, 33, 64, 2, 2, 1),
    ("dense", "bf16", 11, 21, 544, 2, 2, 4),
    ("w4", "bf16", 3, 48, 96, 1, 2, 1),
    ("w4", "f16", 10, 33, 1088, 2, 1, 2),
    ("fp8", "bf16", 2, 35, 208, 1, 1, 1),
    ("fp8", "f16", 16, 20, 640, 2, 2, 2),
]


@pytest.mark.parametrize("case", RESIDUAL, ids=lambda case: "-".join(map(str, case)))
def test_a_residual_is_added_to_the_product(
    emulator: Emulator, case: tuple[str, str, *tuple[int, ...]]
) -> None:
    """In place and into other memory, to the bits of two launches; the squares are those of what
    was stored."""
    form, dtype, tokens, outputs, inputs, tiles, rows, parts = case
    rng, w = np.random.default_rng(outputs), matrix(form, (outputs, inputs), dtype)
    x, bias = normal(rng, (tokens, inputs), dtype), normal(rng, (outputs,), "f32")
    how: dict[str, Any] = {"bias": bias, "tiles": tiles, "rows": rows, "parts": parts}
    residual, plain = normal(rng, (tokens, outputs), dtype), empty((tokens, outputs), x.dtype)
    multiply(emulator, w, x, plain, dtype, **how)
    want = (plain.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    run = min(w.rows * rows, 16)
    starts = range(0, outputs, run)
    for y in (empty(plain.shape, x.dtype), inout(residual, x.dtype)):
        given = residual if y.flags.writeable and np.isnan(wide(y)).any() else y
        squares = empty((tokens, len(starts)), np.float32)
        fused = (given, squares, None, None, 0, 0.0)
        multiply(emulator, w, x, y, dtype, fused=fused, **how)
        np.testing.assert_array_equal(y, want)
        parts = np.add.reduceat(wide(y) ** 2, starts, axis=1)
        np.testing.assert_allclose(squares, parts, rtol=1e-5)


NORM = [  # form, dtype, tokens, outputs, inputs, tiles, rows, splits
    ("dense", "bf16", 1, 40, 1056, 1, 1, 1),
    ("dense", "bf16", 9, 33, 64, 2, 2, 1),
    ("dense", "f16", 10, 21, 544, 1, 2, 4),
    ("w4", "bf16", 3, 48, 96, 1, 2, 1),
    ("w4", "f16", 10, 33, 1088, 2, 1, 2),
    ("q6_k", "bf16", 2, 16, 96, 1, 1, 1),
    ("q4_k", "bf16", 9, 40, 320, 2, 2, 1),
    ("q8", "f16", 1, 32, 160, 1, 1, 1),
    ("fp8", "bf16", 2, 35, 208, 1, 1, 1),
    ("fp8", "f16", 16, 20, 640, 2, 2, 2),
]


@pytest.mark.parametrize("case", NORM, ids=lambda case: "-".join(map(str, case)))
def test_a_product_normalises_its_rows(
    emulator: Emulator, case: tuple[str, str, *tuple[int, ...]]
) -> None:
    """As the product of rows that rms_norm has written; each row has its own scale."""
    form, dtype, tokens, outputs, inputs, tiles, rows, parts = case
    rng, w, eps = np.random.default_rng(inputs), matrix(form, (outputs, inputs), dtype), 1e-2
    sizes = np.logspace(-2, 1, tokens)[:, None]
    x = on_device(rng.standard_normal((tokens, inputs)) * sizes, normal(rng, (1,), dtype).dtype)
    weight, how = normal(rng, (inputs,), "f32"), {"tiles": tiles, "rows": rows, "parts": parts}
    count = 37  # more than a warp has lanes
    shares = rng.dirichlet(np.ones(count), tokens)
    squares = on_device((wide(x) ** 2).sum(axis=1)[:, None] * shares, np.float32)
    normed = empty(x.shape, x.dtype)
    norm = KERNELS["rms_norm"].variant(**options(dtype, VX_VEC=vector_width(inputs)))
    emulator.launch(norm, {"rows": tokens, "width": inputs}, [x, weight, normed, inputs, eps])
    want, y = (empty((tokens, outputs), x.dtype) for _ in range(2))
    multiply(emulator, w, normed, want, dtype, **how)
    fused = (None, None, weight, squares, count, eps)
    multiply(emulator, w, x, y, dtype, fused=fused, VX_NORM=1, **how)
    assert_near(y, wide(want), dtype, scale=2)  # sums of squares in another order


GATED = [  # form, dtype, kind, tokens, width, inputs, tiles
    ("dense", "bf16", "silu", 1, 40, 1024, 1),
    ("dense", "f16", "gelu", 9, 33, 96, 2),
    ("dense", "bf16", "gelu_tanh", 16, 1, 32, 2),
    ("dense", "f16", "relu", 1, 1, 32, 1),
    ("dense", "bf16", "relu", 3, 17, 544, 1),
    ("w4", "bf16", "silu", 3, 48, 96, 1),
    ("w4", "f16", "gelu", 10, 32, 1088, 2),
    ("q4_k", "bf16", "gelu_tanh", 9, 16, 320, 2),
    ("q6_k", "bf16", "relu", 2, 32, 96, 1),
    ("q8", "f16", "silu", 1, 48, 160, 1),
    ("fp8", "bf16", "silu", 2, 35, 208, 1),
    ("fp8", "f16", "gelu", 16, 20, 640, 2),
    ("fp8", "f16", "gelu_tanh", 1, 16, 16, 1),
    ("fp8", "bf16", "relu", 9, 1, 48, 2),
]


@pytest.mark.parametrize("case", GATED, ids=lambda case: "-".join(map(str, case)))
def test_a_gate_has_the_bits_of_two_launches(
    emulator: Emulator, case: tuple[str, str, str, *tuple[int, ...]]
) -> None:
    form, dtype, kind, tokens, width, inputs, tiles = case
    rng, w = np.random.default_rng(width), matrix(form, (2 * width, inputs), dtype)
    x = normal(rng, (tokens, inputs), dtype)
    for bias in (None, normal(rng, (2 * width,), "f32")):
        product, want, y = (empty((tokens, n), x.dtype) for n in (2 * width, width, width))
        multiply(emulator, w, x, product, dtype, bias=bias, tiles=tiles)
        act = options(dtype, VX_VEC=vector_width(width), VX_ACT=GATES[kind])
        sizes = {"rows": tokens, "width": width}
        emulator.launch(
            KERNELS["gated_act"].variant(**act), sizes, [on_device(product, x.dtype), want, width]
        )
        multiply(emulator, w, x, y, dtype, bias=bias, tiles=tiles, VX_GATED=1 + GATES[kind])
        np.testing.assert_array_equal(wide(y), wide(want))
