"""Products with the integers and the FP8 codes of experts, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant
from vllmx_cuda.kernel_specs.types import PLAIN
from vllmx_cuda.kernel_specs.w4 import ZERO_CODES, ZERO_MIDDLE, folds
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import Array, assert_near, normal, on_device, options, wide
from .test_cuda_codes8 import E4M3, as_stored, scaled
from .test_cuda_gguf import tiles_of
from .test_cuda_w4 import random_weights

F16, BF16, F32 = DTYPES["f16"], DTYPES["bf16"], DTYPES["f32"]
EXPERTS = 3


def check(
    emulator: Emulator, variant: Variant, weights: list[Array], values: Array, layout: list[int],
    *, dtype: str, tokens: int, chosen: int, tile: int, biased: bool, out: int,
) -> None:  # fmt: skip
    """Compares products up from the rows of tokens and down from those of positions; each expert
    has its matrix."""
    (experts, outputs, inputs), slots = values.shape, tokens * chosen
    rng = np.random.default_rng(inputs + tokens)
    x, bias = normal(rng, (tokens, inputs), dtype), normal(rng, (experts, outputs), "f32")
    given = bias if biased else None
    ids = on_device(rng.integers(experts, size=slots), np.int32)
    order, tiles = tiles_of(ids, tile)
    rows = order // chosen
    want = np.einsum("soi,si->so", values[ids[order]], wide(x)[rows])
    want += wide(bias)[ids[order]] if biased else 0
    magnitude = np.einsum("soi,si->so", abs(values)[ids[order]], abs(wide(x))[rows]).max()
    y = empty((slots, outputs), np.float32 if out else x.dtype)
    sizes = {"outputs": outputs, "tiles": len(tiles), "width": inputs}
    shape = [chosen, outputs, inputs, *layout]
    emulator.launch(variant, sizes, [x, *weights, given, order, tiles, y, *shape])
    assert_near(y, want, "f32" if out else dtype, scale=magnitude if out else max(2, magnitude / 8))
    straight, by_position = empty(y.shape, y.dtype), on_device(x[rows], x.dtype)
    emulator.launch(variant, sizes, [by_position, *weights, given, None, tiles, straight, *shape])
    np.testing.assert_array_equal(straight, y)


W4 = [  # dtype, bits, scale, zero, group, tokens, chosen, outputs, inputs, tiles, rows, out
    ("bf16", 4, F16, ZERO_CODES, 128, 5, 2, 48, 256, 1, 2, 0),
    ("bf16", 4, BF16, ZERO_MIDDLE, 32, 1, 2, 16, 32, 1, 1, 1),
    ("f16", 4, F16, ZERO_CODES, 64, 1, 1, 16, 32, 2, 2, 0),
    ("f16", 4, F32, ZERO_MIDDLE, 4096, 40, 2, 48, 1056, 4, 2, 1),
    ("bf16", 8, BF16, ZERO_MIDDLE, 4096, 11, 2, 80, 608, 2, 2, 0),
    ("f16", 8, F32, ZERO_CODES, 32, 3, 3, 48, 96, 1, 1, 1),
]


@pytest.mark.parametrize("case", W4, ids=lambda case: "-".join(map(str, case)))
def test_integers(emulator: Emulator, case: tuple[str, *tuple[int, ...]]) -> None:
    dtype, bits, scale, zero, group, tokens, chosen, outputs, inputs, tiles, rows, out = case
    rng = np.random.default_rng(outputs)
    w = random_weights(rng, (EXPERTS * outputs, inputs), bits, scale, zero, group)
    more = {"VX_TILES": tiles, "VX_ROWS": rows, "VX_FOLDS": folds(w.form.group_shift), **PLAIN}
    check(
        emulator,
        KERNELS["experts_w4"].variant(**options(dtype, VX_OUT=out, **more, **w.form.options)),
        [w.data],
        w.values.reshape(EXPERTS, outputs, inputs),
        [w.form.group_shift],
        dtype=dtype,
        tokens=tokens,
        chosen=chosen,
        tile=8 * tiles,
        biased=tokens != 5,
        out=out,
    )


CODES8 = [  # dtype, block, tokens, chosen, outputs, inputs, tiles, rows, out
    ("bf16", (1, 10**6), 5, 2, 33, 272, 1, 2, 0),
    ("bf16", (48, 128), 11, 2, 96, 640, 2, 2, 1),
    ("f16", (1, 10**6), 1, 1, 1, 16, 1, 1, 0),
    ("f16", (1, 64), 40, 2, 35, 208, 4, 2, 1),
    ("bf16", (1, 10**6), 1, 2, 1, 16, 4, 1, 1),
    ("f16", (16, 128), 3, 3, 48, 1040, 2, 1, 0),
]


@pytest.mark.parametrize("case", CODES8, ids=str)
def test_codes(emulator: Emulator, case: tuple[str, tuple[int, int], *tuple[int, ...]]) -> None:
    """Scales of rows, of parts of rows, of blocks whose last is smaller."""
    dtype, sides, tokens, chosen, outputs, inputs, tiles, rows, out = case
    rng, shape = np.random.default_rng(inputs), (EXPERTS * outputs, inputs)
    block = (sides[0], min(sides[1], inputs))
    raw = rng.integers(0, 127, shape) | rng.choice([0, 128], shape)
    codes, grid = on_device(raw, np.uint8), (shape[0] // block[0], -(-inputs // block[1]))
    scales = on_device(rng.uniform(0.5, 2, grid) * rng.choice([-1, 1], grid) / 300, np.float32)
    whole = wide(scaled(np.ones(shape, np.float32), scales, block))  # type: ignore[arg-type]
    values = (wide(codes.view(E4M3)) * whole).reshape(EXPERTS, outputs, inputs)
    shift = 31 if block[1] == inputs else block[1].bit_length() - 1
    check(
        emulator,
        KERNELS["experts_codes8"].variant(
            **options(dtype, VX_TILES=tiles, VX_ROWS=rows, VX_OUT=out, **PLAIN)
        ),
        [codes, as_stored(scales, block)],
        values,
        [block[0], shift],
        dtype=dtype,
        tokens=tokens,
        chosen=chosen,
        tile=8 * tiles,
        biased=tokens != 5,
        out=out,
    )
