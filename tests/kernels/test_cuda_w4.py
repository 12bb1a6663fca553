"""Products with 4- and 8-bit weights in the order of fragments, on the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_cuda.kernel_specs import DTYPES, KERNELS
from vllmx_cuda.kernel_specs.gguf import BLOCKS
from vllmx_cuda.kernel_specs.types import PLAIN
from vllmx_cuda.kernel_specs.w4 import (
    BLOCK_FORMS,
    MINIMA,
    ZERO_CODES,
    ZERO_MIDDLE,
    folds,
    splits,
    token_tiles,
)
from vllmx_cuda.matrices.w4_packing import Packing, packed, packing_of
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import (
    NOTHING_FUSED,
    NUMPY_TYPES,
    Array,
    assert_near,
    inout,
    normal,
    on_device,
    options,
    wide,
)
from .cuda_w4_blocks import packed_blocks
from .test_cuda_gguf import random_blocks

F16, BF16, F32 = DTYPES["f16"], DTYPES["bf16"], DTYPES["f32"]


@dataclass(frozen=True)
class Weights:
    """A matrix on the device, and the values that it means."""

    form: Packing
    values: Array  # (N, K) float64
    data: Array


def random_weights(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, scale: int, zero: int, group: int
) -> Weights:
    (n, k), groups = shape, -(-shape[1] // group)
    form = Packing(bits, scale, zero, 31 if group >= k else group.bit_length() - 1)
    codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
    kind = {value: NUMPY_TYPES[name] for name, value in DTYPES.items()}[scale]
    scales = (rng.uniform(0.5, 2, (n, groups)) * rng.choice([-1, 1], (n, groups)) / 9).astype(kind)
    wide_codes = codes.astype(np.float64)
    column = np.arange(k) // group
    if zero == MINIMA:
        lows = rng.uniform(-1, 1, (n, groups)).astype(kind)
        values = wide_codes * wide(scales)[:, column] + wide(lows)[:, column]
    elif zero == ZERO_CODES:
        lows = rng.integers(0, 1 << bits, (n, groups))
        values = (wide_codes - lows[:, column]) * wide(scales)[:, column]
    else:
        lows = None
        values = (wide_codes - (1 << (bits - 1))) * wide(scales)[:, column]
    data = packed(codes, scales, lows, form)
    assert data.shape == (-(-n // 16), form.row_tile_bytes(k))
    return Weights(form, values, on_device(data, np.uint8))


def run(
    emulator: Emulator,
    w: Weights,
    x: Array,
    bias: Array | None,
    dtype: str,
    out: int,
    *,
    tiles: int,
    rows: int,
    parts: int = 1,
) -> Array:
    (tokens, inputs), outputs = x.shape, len(w.values)
    pitch = outputs + 3
    y = inout(np.full((tokens, pitch), 7), np.float32 if out else x.dtype)
    partial = empty((parts, tokens, outputs), np.float32) if parts > 1 else None
    arrivals = inout(np.zeros(-(-outputs // 16) * 8), np.uint32) if parts > 1 else None
    chosen = options(
        dtype,
        VX_TILES=tiles,
        VX_ROWS=rows,
        VX_FOLDS=folds(w.form.group_shift),
        VX_OUT=out,
        **w.form.options,
        **PLAIN,
    )
    sizes = {"tokens": tokens, "outputs": outputs, "width": inputs, "splits": parts}
    emulator.launch(
        KERNELS["w4_linear"].variant(**chosen),
        sizes,
        [
            x,
            w.data,
            bias,
            y,
            partial,
            arrivals,
            tokens,
            outputs,
            inputs,
            pitch,
            w.form.group_shift,
            *NOTHING_FUSED,
        ],
    )
    if arrivals is not None:
        assert not arrivals.any()  # ready for the next product
    np.testing.assert_array_equal(y[:, outputs:], 7)
    return y[:, :outputs]


LINEAR = [  # dtype, bits, scale, zero, group, tokens, outputs, inputs, tiles, rows, splits, out
    ("bf16", 4, F16, ZERO_CODES, 128, 1, 40, 1024, 1, 1, 1, 0),
    ("f16", 4, F16, ZERO_MIDDLE, 32, 7, 33, 608, 1, 2, 1, 1),
    ("bf16", 4, BF16, ZERO_MIDDLE, 64, 13, 16, 64, 2, 2, 1, 0),
    ("f16", 4, F32, ZERO_CODES, 4096, 17, 50, 1056, 4, 2, 2, 1),
    ("bf16", 4, F16, MINIMA, 32, 9, 31, 672, 2, 1, 1, 1),
    ("f16", 4, F16, MINIMA, 256, 3, 16, 1088, 1, 2, 4, 0),
    ("bf16", 4, F16, ZERO_CODES, 128, 64, 32, 256, 8, 2, 1, 1),
    ("bf16", 4, F32, ZERO_MIDDLE, 32, 10, 24, 96, 1, 1, 1, 0),  # two passes
    ("bf16", 8, F32, ZERO_MIDDLE, 4096, 5, 40, 1056, 1, 2, 1, 1),
    ("f16", 8, F16, ZERO_CODES, 32, 12, 17, 544, 2, 1, 2, 0),
    ("bf16", 8, BF16, ZERO_CODES, 64, 2, 16, 640, 1, 1, 1, 0),
    ("bf16", 8, F16, ZERO_MIDDLE, 32, 33, 40, 1056, 4, 2, 1, 1),  # Q8_0, two passes
    ("f16", 8, F16, ZERO_MIDDLE, 32, 1, 16, 1056, 1, 1, 1, 0),
    ("bf16", 6, F16, ZERO_MIDDLE, 16, 1, 40, 1056, 1, 1, 1, 0),
    ("f16", 6, F16, ZERO_MIDDLE, 16, 19, 33, 1088, 4, 2, 2, 1),
    ("bf16", 6, F32, ZERO_CODES, 16, 9, 17, 544, 1, 2, 1, 1),
    ("bf16", 4, F16, ZERO_CODES, 128, 1, 1, 32, 1, 1, 1, 0),
    ("f16", 4, F32, ZERO_CODES, 4096, 33, 1, 32, 4, 2, 1, 1),
    # rings that are filled more than once
    ("bf16", 4, F16, ZERO_CODES, 128, 1, 16, 5120, 1, 1, 1, 1),
    ("bf16", 4, F16, MINIMA, 32, 3, 48, 3104, 1, 2, 1, 1),
    ("f16", 8, F32, ZERO_CODES, 64, 2, 32, 2560, 1, 2, 1, 1),
]


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: "-".join(map(str, case)))
def test_w4_linear(emulator: Emulator, case: tuple[str, *tuple[int, ...]]) -> None:
    dtype, bits, scale, zero, group, tokens, outputs, inputs, tiles, rows, parts, out = case
    rng = np.random.default_rng(inputs + outputs)
    w = random_weights(rng, (outputs, inputs), bits, scale, zero, group)
    x, bias = normal(rng, (tokens, inputs), dtype), normal(rng, (outputs,), "f32")
    for given in (None, bias):
        y = run(emulator, w, x, given, dtype, out, tiles=tiles, rows=rows, parts=parts)
        want = wide(x) @ w.values.T + (0 if given is None else wide(given))
        # exact products, sums in f32
        limit = 1e-6 * inputs**0.5 * (1 if bits == 4 else 4) * abs(want).max()
        if out:
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=limit)
        else:
            assert_near(y, want, dtype, scale=max(1.0, abs(want).max() / 8))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_token_has_the_same_bits_in_any_batch(emulator: Emulator, parts: int) -> None:
    rng = np.random.default_rng(5)
    w = random_weights(rng, (48, 1152), 4, F16, ZERO_CODES, 128)
    x = normal(rng, (19, 1152), "bf16")
    whole = run(emulator, w, x, None, "bf16", 1, tiles=4, rows=2, parts=parts)
    for first, last, tiles, rows in ((0, 1, 1, 1), (3, 12, 2, 2), (10, 19, 1, 2)):
        some = on_device(x[first:last], x.dtype)
        got = run(emulator, w, some, None, "bf16", 1, tiles=tiles, rows=rows, parts=parts)
        np.testing.assert_array_equal(got, whole[first:last])


DEQUANTIZE = [
    ("bf16", 4, F16, ZERO_CODES, 32, 17, 544),
    ("f16", 4, F32, ZERO_MIDDLE, 4096, 32, 1056),
    ("bf16", 4, F16, MINIMA, 64, 5, 608),
    ("bf16", 8, BF16, ZERO_CODES, 128, 33, 640),
    ("f16", 8, F16, ZERO_MIDDLE, 32, 16, 96),
    ("bf16", 6, F16, ZERO_MIDDLE, 16, 17, 544),
    ("f32", 4, F16, ZERO_CODES, 32, 19, 160),
    ("f32", 4, F16, ZERO_CODES, 32, 1, 32),
    ("f16", 8, F16, ZERO_MIDDLE, 32, 1, 32),
    ("f16", 8, F16, ZERO_MIDDLE, 32, 33, 96),
    ("bf16", 4, F16, ZERO_CODES, 32, 1, 32),
]


@pytest.mark.parametrize(
    ("dtype", "bits", "scale", "zero", "group", "outputs", "inputs"), DEQUANTIZE
)
def test_w4_dequantize(
    emulator: Emulator,
    dtype: str,
    bits: int,
    scale: int,
    zero: int,
    group: int,
    outputs: int,
    inputs: int,
) -> None:
    w = random_weights(np.random.default_rng(inputs), (outputs, inputs), bits, scale, zero, group)
    y = empty((outputs, inputs), NUMPY_TYPES[dtype])
    emulator.launch(
        KERNELS["w4_dequantize"].variant(**options(dtype, **w.form.options)),
        {"outputs": outputs, "width": inputs},
        [w.data, y, outputs, inputs, w.form.group_shift],
    )
    # rounded to f32 on the way, as the dequantised weights of every other path
    want = w.values.astype(np.float32).astype(y.dtype)
    np.testing.assert_array_equal(y, want)
    few = [outputs - 1, 0, 3, outputs // 2, 3] if outputs > 3 else [0]
    ids, picked = on_device(few, np.int32), empty((len(few), inputs), NUMPY_TYPES[dtype])
    emulator.launch(
        KERNELS["w4_gather"].variant(**options(dtype, **w.form.options)),
        {"rows": len(few), "width": inputs},
        [w.data, ids, picked, inputs, w.form.group_shift],
    )
    np.testing.assert_array_equal(picked, want[ids])


REPACKED = [
    (name, *shape)
    for name in BLOCK_FORMS
    for shape in (
        [(16, 256), (48, 768), (272, 256)]
        if name.endswith("_k")
        else [(16, 32), (48, 96), (32, 288), (272, 64), (16, 544)]
    )
]


def repacked(
    emulator: Emulator, name: str, blocks: Array, shape: tuple[int, int]
) -> tuple[Array, int]:
    """Tiles, and what the kernel calls a fault."""
    rows, cols = shape
    bits, zero, shift = BLOCK_FORMS[name]
    data = empty((rows // 16, Packing(bits, F16, zero, shift).row_tile_bytes(cols)), np.uint8)
    fault = inout([0], np.uint32)
    emulator.launch(
        KERNELS["w4_repack_blocks"].variant(VX_BLOCK=BLOCKS[name]),
        {"outputs": rows, "width": cols},
        [on_device(blocks, np.uint8), data, fault, cols],
    )
    return data, int(fault[0])


@pytest.mark.parametrize(("name", "rows", "cols"), REPACKED)
def test_w4_repack_blocks(emulator: Emulator, name: str, rows: int, cols: int) -> None:
    """Byte for byte what numpy makes of random blocks."""
    blocks, _ = random_blocks(name, rows, cols, np.random.default_rng(rows + cols))
    part = weight_part("w", TYPES_BY_NAME[name.upper()], (rows, cols), blocks.reshape(-1))
    data, fault = repacked(emulator, name, blocks, (rows, cols))
    np.testing.assert_array_equal(data, packed_blocks(part))
    assert fault == 0


@pytest.mark.parametrize("name", BLOCK_FORMS)
def test_blocks_of_gguf(emulator: Emulator, name: str) -> None:
    """What is repacked means what the blocks mean."""
    blocks, values = random_blocks(name, 32, 512, np.random.default_rng(8))
    part = weight_part("w", TYPES_BY_NAME[name.upper()], (32, 512), blocks.reshape(-1))
    packing = packing_of(part)
    assert packing is not None
    data, y = repacked(emulator, name, blocks, (32, 512))[0], empty((32, 512), np.float32)
    emulator.launch(
        KERNELS["w4_dequantize"].variant(**options("f32", **packing.options)),
        {"outputs": 32, "width": 512},
        [data, y, 32, 512, packing.group_shift],
    )
    rounding = 1e-3 * abs(values).max() if name in ("q4_k", "q6_k") else 0
    np.testing.assert_allclose(y, values, rtol=0, atol=rounding)


DAMAGED = [  # type, byte of the f16, its value, what is found
    ("q4_0", 0, np.inf, np.inf),
    ("q4_1", 2, np.nan, np.nan),
    ("q8_0", 0, -np.inf, np.inf),
    ("q4_k", 0, 60000.0, 60000 * 63),
    ("q4_k", 2, -2000.0, 2000 * 63),
    ("q6_k", 208, 1000.0, 128000),
    ("q6_k", 208, 500.0, 0),
]


@pytest.mark.parametrize("case", DAMAGED, ids=str)
def test_factors_beyond_float16_are_found(
    emulator: Emulator, case: tuple[str, int, float, float]
) -> None:
    name, at, factor, want = case
    values = TYPES_BY_NAME[name.upper()].values
    blocks = np.array(random_blocks(name, 16, 2 * values, np.random.default_rng(8))[0])
    damaged = blocks.reshape(32, -1)[17]  # of the ninth row
    damaged[at : at + 2] = np.array([factor], np.float16).view(np.uint8)
    if name == "q4_k":
        damaged[4:16] = 255
    if name == "q6_k":
        damaged[192:208] = 128
    _, fault = repacked(emulator, name, blocks, (16, 2 * values))
    np.testing.assert_array_equal(np.array(fault, np.uint32).view(np.float32), np.float32(want))


def test_widths_without_whole_groups_are_refused() -> None:
    kernel = KERNELS["w4_dequantize"].variant(
        **options("bf16", VX_BITS=4, VX_SCALE=F16, VX_ZERO=ZERO_CODES)
    )
    with pytest.raises(ConfigError, match="multiple of 32 values, got 48"):
        kernel.launch({"outputs": 16, "width": 48})


def test_minima_and_small_groups_share_fewer_tokens() -> None:
    assert [token_tiles(tokens, ZERO_CODES, 1, 80) for tokens in (1, 9, 33, 200)] == [1, 2, 8, 8]
    assert [token_tiles(tokens, ZERO_CODES, 2, 80) for tokens in (8, 33, 200)] == [1, 4, 4]
    assert token_tiles(64, MINIMA, 1, 80) == 4
    assert token_tiles(64, ZERO_CODES, 1, 75) == 4
    kernel = KERNELS["w4_linear"].variant(
        **options("bf16", VX_BITS=4, VX_SCALE=F16, VX_ZERO=MINIMA, VX_TILES=8, VX_ROWS=2),
        VX_FOLDS=1,
        **PLAIN,
        VX_OUT=0,
    )
    sizes = {"tokens": 64, "outputs": 16, "width": 64, "splits": 1}
    with pytest.raises(ConfigError, match=r"VX_TILES must be at most 4 .registers"):
        kernel.launch(sizes)


def test_splits_feed_processors_that_rows_alone_leave_idle() -> None:
    assert splits(4096, 12288, 132) == 1  # 128 blocks
    assert splits(1024, 16384, 132) == 4  # 32 blocks, 8 tiles of columns a warp
    assert splits(1024, 3072, 132) == 1  # pieces would be too short
