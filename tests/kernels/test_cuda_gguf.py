"""GGUF blocks on the emulator, against the decoder of the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_cuda.kernel_specs.gguf import BLOCKS, RUN, block_values
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import NUMPY_TYPES, Array, assert_near, normal, on_device, options, wide

# Where the f16 scales of a block lie: random bytes there could be NaN.
SCALES = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
          "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "q2_k": (80, 82), "q3_k": (108,),
          "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": ()}  # fmt: skip


def random_blocks(
    name: str, rows: int, width: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """(bytes on the device, (rows, width) float32 values)."""
    kind = GGMLQuantizationType(BLOCKS[name])
    values, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, width // values, size)).astype(np.uint8)
    if name == "mxfp4":  # an exponent
        blocks[..., 0] = rng.integers(120, 128, blocks.shape[:2])
    for at in SCALES[name]:
        scale = rng.standard_normal((rows, width // values, 1)).astype(np.float16) * 0.1
        blocks[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
    flat = blocks.reshape(rows, -1)
    return on_device(flat, np.uint8), dequantize(flat, kind).astype(np.float32)


@pytest.mark.parametrize("name", BLOCKS)
def test_dequantised_values_are_ggmls(emulator: Emulator, name: str) -> None:
    rng = np.random.default_rng(BLOCKS[name])
    blocks, values = random_blocks(name, 5, 512, rng)
    variant = KERNELS["gguf_dequantize"].variant(**options("f32", VX_BLOCK=BLOCKS[name]))
    y = empty((5, 512), np.float32)
    emulator.launch(variant, {"rows": 5, "width": 512}, [blocks, None, y, 512])
    np.testing.assert_array_equal(y, values)
    ids = on_device([3, 0], np.int32)
    picked = empty((2, 512), np.float32)
    emulator.launch(variant, {"rows": 2, "width": 512}, [blocks, ids, picked, 512])
    np.testing.assert_array_equal(picked, values[ids])


WIDE = RUN * 256  # values that a block of threads takes


@pytest.mark.parametrize("name", BLOCKS)
def test_one_block_and_more_than_a_launch_takes(emulator: Emulator, name: str) -> None:
    rng, unit = np.random.default_rng(BLOCKS[name]), block_values(BLOCKS[name])
    variant = KERNELS["gguf_dequantize"].variant(**options("f32", VX_BLOCK=BLOCKS[name]))
    for width in (unit, WIDE + unit):
        blocks, values = random_blocks(name, 1, width, rng)
        y = empty((1, width), np.float32)
        emulator.launch(variant, {"rows": 1, "width": width}, [blocks, None, y, width])
        np.testing.assert_array_equal(y, values)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("bf16", name) for name in ("q4_k", "q6_k", "q8_0", "q5_1", "mxfp4")),
        *(("f16", name) for name in ("q4_k", "q2_k", "q3_k", "q5_0", "iq4_xs")),
    ],
)
def test_dequantised_to_16_bits(emulator: Emulator, dtype: str, name: str) -> None:
    rng, unit = np.random.default_rng(0), block_values(BLOCKS[name])
    variant = KERNELS["gguf_dequantize"].variant(**options(dtype, VX_BLOCK=BLOCKS[name]))
    for rows, width in ((1, unit), (3, 3 * unit)):
        blocks, values = random_blocks(name, rows, width, rng)
        y = empty((rows, width), NUMPY_TYPES[dtype])
        emulator.launch(variant, {"rows": rows, "width": width}, [blocks, None, y, width])
        np.testing.assert_array_equal(y, values.astype(y.dtype))


def test_extreme_exponents_of_mxfp4(emulator: Emulator) -> None:
    """Scales that are subnormal, and the greatest."""
    blocks = np.full((1, 8, 17), 0x91, np.uint8)
    blocks[0, :, 0] = [0, 1, 2, 3, 252, 253, 254, 255]
    values = dequantize(blocks.reshape(1, -1), GGMLQuantizationType.MXFP4)
    variant = KERNELS["gguf_dequantize"].variant(**options("f32", VX_BLOCK=BLOCKS["mxfp4"]))
    y = empty((1, 256), np.float32)
    arguments = [on_device(blocks.reshape(1, -1), np.uint8), None, y, 256]
    emulator.launch(variant, {"rows": 1, "width": 256}, arguments)
    np.testing.assert_array_equal(y, values)


GEMV = [  # block, dtype, tokens, tile, out, outputs, blocks of a row or 0: 4352 values
    *((name, *case) for name in BLOCKS for case in (
        ("bf16", 1, 1, 0, 5, 0), ("f32", 5, 4, 1, 5, 0),
        ("bf16", 3, 1, 0, 3, 3), ("f32", 1, 4, 1, 1, 1),
    )),
    ("q5_k", "f16", 9, 8, 0, 5, 0), ("q5_1", "f16", 3, 2, 0, 5, 0), ("q5_1", "f16", 1, 2, 0, 1, 1),
    ("q5_1", "f16", 3, 2, 0, 3, 3), ("q8_0", "bf16", 1, 1, 0, 1, 1), ("q8_0", "f32", 3, 4, 1, 3, 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "tokens", "tile", "out", "outputs", "blocks"), GEMV)
def test_gguf_gemv(
    emulator: Emulator,
    name: str,
    dtype: str,
    tokens: int,
    tile: int,
    out: int,
    outputs: int,
    blocks: int,
) -> None:
    rng = np.random.default_rng(BLOCKS[name])
    inputs = blocks * block_values(BLOCKS[name]) or 4352
    w, values = random_blocks(name, outputs, inputs, rng)
    x, bias = normal(rng, (tokens, inputs), dtype), normal(rng, (outputs,), "f32")
    bias = None if blocks == 3 else bias
    chosen = options(dtype, VX_BLOCK=BLOCKS[name], VX_TOKENS=tile, VX_OUT=out)
    codes, scales = empty(x.shape, np.int8), empty((tokens, inputs // 32, 2), np.float32)
    size = {"rows": tokens, "width": inputs}
    emulator.launch(
        KERNELS["quantize_q8"].variant(**options(dtype)), size, [x, codes, scales, inputs]
    )
    step = wide(scales[..., 0])
    rounded = (wide(codes).reshape(tokens, -1, 32) * step[..., None]).reshape(tokens, -1)
    assert (abs(rounded - wide(x)).reshape(tokens, -1, 32).max(axis=2) <= 0.51 * step).all()
    sums = codes.reshape(tokens, -1, 2, 16).sum(axis=3, dtype=np.int16)
    np.testing.assert_array_equal(scales[..., 1].copy().view(np.int16).reshape(sums.shape), sums)

    y = empty((tokens, outputs + 3), np.float32 if out else x.dtype)  # columns of a wider product
    y[:, outputs:] = 7
    arguments = [codes, scales, w, bias, y, tokens, outputs, inputs, outputs + 3]
    sizes = {"tokens": tokens, "outputs": outputs}
    emulator.launch(KERNELS["gguf_gemv"].variant(**chosen), sizes, arguments)
    want = rounded @ wide(values).T + (0 if bias is None else wide(bias))
    assert (y[:, outputs:] == 7).all()
    y = y[:, :outputs]
    assert_near(y, want, "f32" if out else dtype, scale=abs(want).max() + 1 if out else 1)


# block, dtype, tokens, chosen, tile, outputs, blocks of a row, with bias, f32 answers
EXPERTS = [
    ("q4_k", "bf16", 9, 2, 8, 5, 3, True, 0),
    ("mxfp4", "bf16", 2, 1, 4, 1, 1, False, 1),
    ("q8_0", "f16", 5, 2, 8, 3, 3, False, 0),
    ("q6_k", "f16", 1, 2, 4, 1, 1, True, 1),
    ("q5_1", "f32", 3, 2, 4, 3, 3, True, 1),
    ("q8_0", "f32", 1, 1, 4, 1, 1, False, 1),
]


@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: "-".join(map(str, case)))
def test_experts(emulator: Emulator, case: tuple[str, str, *tuple[int, ...]]) -> None:
    """Products go up from the rows of tokens and down from those of positions; each expert has its
    matrix."""
    name, dtype, tokens, chosen, tile, outputs, blocks, biased, out = case
    rng, experts = np.random.default_rng(tokens), 3
    inputs, slots = blocks * block_values(BLOCKS[name]), tokens * chosen
    w, values = random_blocks(name, experts * outputs, inputs, rng)
    x, bias = normal(rng, (tokens, inputs), dtype), normal(rng, (experts, outputs), "f32")
    given = bias if biased else None
    ids = on_device(rng.integers(experts, size=slots), np.int32)
    order, tiles = tiles_of(ids, tile)
    codes, scales = empty(x.shape, np.int8), empty((tokens, inputs // 32, 2), np.float32)
    size = {"rows": tokens, "width": inputs}
    emulator.launch(
        KERNELS["quantize_q8"].variant(**options(dtype)), size, [x, codes, scales, inputs]
    )
    step = wide(scales[..., 0])
    rounded = (wide(codes).reshape(tokens, -1, 32) * step[..., None]).reshape(tokens, -1)
    rows = order // chosen
    want = np.einsum(
        "soi,si->so", wide(values).reshape(experts, outputs, -1)[ids[order]], rounded[rows]
    )
    want += wide(bias)[ids[order]] if biased else 0
    chosen_options = options(dtype, VX_BLOCK=BLOCKS[name], VX_TOKENS=tile, VX_OUT=out)
    variant, sizes = (
        KERNELS["experts_gguf"].variant(**chosen_options),
        {"outputs": outputs, "tiles": len(tiles)},
    )
    y = empty((slots, outputs), np.float32 if out else x.dtype)
    shape = (chosen, outputs, inputs)
    emulator.launch(variant, sizes, [codes, scales, w, given, order, tiles, y, *shape])
    assert_near(y, want, "f32" if out else dtype, scale=abs(want).max() + 1 if out else 2)
    straight, by_position = (
        empty(y.shape, y.dtype),
        (on_device(a[rows], a.dtype) for a in (codes, scales)),
    )
    emulator.launch(variant, sizes, [*by_position, w, given, None, tiles, straight, *shape])
    np.testing.assert_array_equal(straight, y)


def tiles_of(ids: Array, tile: int) -> tuple[Array, Array]:
    """Slots by expert, and tiles of so many with an unused one behind them."""
    order = np.argsort(ids, kind="stable")
    found = []
    for expert in np.unique(ids):
        at = np.flatnonzero(ids[order] == expert)
        found += [(expert, first, min(tile, at[-1] + 1 - first)) for first in at[::tile]]
    return on_device(order, np.int32), on_device([*found, (0, 0, 0)], np.int32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e-44])
def test_what_is_not_finite_stays_so(emulator: Emulator, bad: float) -> None:
    """A NaN among the activations reaches the sums of its token, and no other's; values too small
    for a scale are zeros."""
    x = np.ones((2, 64), np.float32)
    x[0, :32] = 0
    x[0, 5] = bad
    codes, scales = empty(x.shape, np.int8), empty((2, 2, 2), np.float32)
    sizes = {"rows": 2, "width": 64}
    emulator.launch(KERNELS["quantize_q8"].variant(**options("f32")), sizes, [x, codes, scales, 64])
    assert (codes[0, :32] == 0).all()
    assert np.isnan(scales[0, 0, 0]) if bad != 1e-44 else scales[0, 0, 0] == 0
    assert (codes[0, 32:] == 127).all()
    assert (codes[1] == 127).all()
    np.testing.assert_array_equal(scales[:, 1, 0], np.float32(1) / np.float32(127))
