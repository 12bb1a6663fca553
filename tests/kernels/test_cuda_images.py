"""What models that see images have beside others, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.ops.attention import rotations
from vllmx_core.plan import StepPlan
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_cuda.kernel_specs.images import MAX_AXES, axis_words
from vllmx_testing.cuda.emulator import Emulator, empty
from vllmx_testing.plans import Row, make_plan

from .cuda_arrays import NUMPY_TYPES, assert_near, inout, normal, on_device, options, wide

WIDTHS = [
    ("f32", 1),
    ("f32", 257),
    ("f32", 130),
    ("f32", 2056),
    ("f16", 1),
    ("f16", 33),
    ("f16", 588),
    ("bf16", 1),
    ("bf16", 257),
    ("bf16", 1032),
]


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_patches(emulator: Emulator, dtype: str, width: int) -> None:
    """Rounded to the nearest."""
    rng = np.random.default_rng(width)
    x, kind = normal(rng, (width,), "f32"), NUMPY_TYPES[dtype]
    y = empty(x.shape, kind)
    variant = KERNELS["patches"].variant(**options(dtype, VX_VEC=vector_width(width)))
    emulator.launch(variant, {"count": width}, [x, y, width])
    np.testing.assert_array_equal(y, x.astype(kind))


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
@pytest.mark.parametrize("taps", [0, 1, 4, 7])
def test_mix(emulator: Emulator, dtype: str, width: int, taps: int) -> None:
    rng, rows = np.random.default_rng(width), 1 if width > 500 else 3
    table, weights = normal(rng, (9, width), dtype), normal(rng, (rows, taps), "f32")
    picked = on_device(rng.integers(0, 9, (rows, taps)), np.int32)
    y = empty((rows, width), table.dtype)
    variant = KERNELS["mix"].variant(**options(dtype, VX_VEC=vector_width(width)))
    shape = {"rows": rows, "width": width}
    emulator.launch(variant, shape, [table, picked, weights, y, width, taps])
    want = np.einsum("tke,tk->te", wide(table)[picked], wide(weights))
    assert_near(y, want, dtype, scale=2)


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_features_are_kept_and_placed(emulator: Emulator, dtype: str, width: int) -> None:
    """Features lie in rows of the store in any order; where none is named x stays as it is."""
    rng, rows = np.random.default_rng(width), 1 if width > 500 else 3
    x, store = normal(rng, (rows, width), dtype), inout(np.full((5, width), 7.0), np.float32)
    chosen = options(dtype, VX_VEC=vector_width(width))
    shape, want = {"rows": rows, "width": width}, np.full((5, width), 7.0)
    for to in ([4, 0, 2][:rows], [-1, 1, -1][:rows]):  # -1: hidden states that nobody reads
        arguments = [x, on_device(to, np.int32), store, width]
        emulator.launch(KERNELS["keep"].variant(**chosen), shape, arguments)
        kept = np.array(to) >= 0
        want[np.array(to)[kept]] = wide(x)[kept]
        np.testing.assert_array_equal(store, want)

    features, before = on_device(store, np.float32), normal(rng, (rows, width), dtype)
    for picked in ([2, -1, 4], [-1, 0, 1]):
        for adds in (0, 1):
            y = empty(before.shape, before.dtype)
            emulator.launch(
                KERNELS["place"].variant(**chosen),
                shape,
                [before, on_device(picked[:rows], np.int32), features, y, width, adds],
            )
            want = wide(before)
            for token, row in enumerate(picked[:rows]):
                if row >= 0:
                    want[token] = features[row] + (want[token] if adds else 0)
            assert_near(y, want, dtype)


TURNS = {
    "sections": (0, 0, 1, 2),
    "in turns": (0, 1, 2) * 21 + (0,),
    "one": (0,),
    "last axis": (3, 0),
    "over words": tuple(np.random.default_rng(3).integers(0, MAX_AXES, 128).tolist()),
}


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", TURNS)
def test_turn(emulator: Emulator, name: str, tokens: int) -> None:
    axes = TURNS[name]
    rng, half, lines = np.random.default_rng(tokens), len(axes), max(axes) + 1
    rope = normal(rng, (40, 2 * half), "f32")
    positions = on_device(rng.integers(0, 40, (tokens, lines)), np.int32)
    y, count = empty((tokens, 2 * half), np.float32), tokens * half
    emulator.launch(
        KERNELS["turn"].variant(**options("f32", VX_VEC=1)),
        {"count": count},
        [rope, positions, y, count, half, lines, *axis_words(axes)],
    )
    plan: StepPlan = make_plan([Row([1] * tokens, 0, [0])], 16)
    plan.rope_positions = positions.T
    np.testing.assert_array_equal(y, rotations(rope, plan, axes))
