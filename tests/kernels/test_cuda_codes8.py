"""Codes of 8 bits, int8 and FP8 e4m3, on the emulator, against numpy in higher precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_cuda.kernel_specs.codes8 import CODES
from vllmx_cuda.kernel_specs.types import PLAIN
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

E4M3 = ml_dtypes.float8_e4m3fn
TYPES = {"i8": np.int8, "f8e4m3": E4M3}
LIMITS = {"i8": 127, "f8e4m3": 448}
# Half a code's step: of the whole scale, or of a code's own magnitude above the subnormal ones
STEPS = {"i8": (0.5, 0.0), "f8e4m3": (2.0**-10, 2.0**-4)}


def random_codes(rng: np.random.Generator, shape: tuple[int, int], code: str) -> Array:
    if code == "i8":
        return on_device(rng.integers(-127, 128, shape), np.int8)
    return on_device(rng.standard_normal(shape) * 50, E4M3)


def scaled(codes: Array, scales: Array, block: tuple[int, int]) -> Array:
    """Codes times the scale of their block, in float32 as dequantising rounds."""
    rows, cols = codes.shape
    whole = np.repeat(np.repeat(scales, block[0], 0)[:rows], block[1], 1)[:, :cols]
    result: Array = codes.astype(np.float32) * whole
    return result


def as_stored(scales: Array, block: tuple[int, ...]) -> Array:
    """Those of blocks in whole fours."""
    if block[0] == 1:
        return scales
    return on_device(np.pad(scales, ((0, 0), (0, -scales.shape[1] % 4))), np.float32)


def check_codes(codes: Array, scales: Array, exact: Array, code: str) -> None:
    """The greatest of a row has the greatest code, and all are as near as codes can be."""
    top = abs(exact).max(axis=1)
    np.testing.assert_allclose(scales, top / LIMITS[code], rtol=1e-5)
    values = wide(codes)
    assert (abs(values).max(axis=1)[top > 0] == LIMITS[code]).all()
    absolute, relative = STEPS[code]
    limit = np.maximum(absolute, relative * abs(values)) * 1.001 + 1e-4 * abs(values)
    step = np.where(scales > 0, scales, 1)[:, None].astype(np.float64)
    assert (abs(values - exact / step) <= limit).all()


WIDTHS = [
    ("bf16", 1),
    ("bf16", 33),
    ("bf16", 264),
    ("f16", 1),
    ("f16", 35),
    ("f16", 36),
    ("f32", 1),
    ("f32", 130),
    ("f32", 515),
    ("f32", 2056),
]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_quantize_rows(emulator: Emulator, code: str, dtype: str, width: int) -> None:
    x = np.array(normal(np.random.default_rng(width), (5, width), dtype))
    x[1], x[2, width // 2] = 0, np.nan
    x = on_device(x, x.dtype)
    codes, scales = empty(x.shape, TYPES[code]), empty(5, np.float32)
    vec = vector_width(width)
    variant = KERNELS["quantize_rows"].variant(
        **options(dtype, VX_VEC=vec, VX_CODE=CODES[code], VX_GROUPS=0)
    )
    arguments = [x, codes.view(np.uint8), scales, width, 0.0, 0]
    emulator.launch(variant, {"rows": 5, "width": width}, arguments)
    usual = [0, 1, 3, 4]
    check_codes(codes[usual], scales[usual], wide(x)[usual], code)
    assert np.isnan(scales[2]), "what is not finite is not hidden"


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
@pytest.mark.parametrize("adds", [False, True])
def test_norms_into_codes(
    emulator: Emulator, code: str, dtype: str, width: int, adds: bool
) -> None:
    rng, rows = np.random.default_rng(width), 1 if width in (33, 35, 515) else 3
    x, weight = normal(rng, (rows, width), dtype), normal(rng, (width,), "f32")
    residual = inout(rng.standard_normal((rows, width)), NUMPY_TYPES[dtype])
    before = residual.copy()
    codes, scales = empty(x.shape, TYPES[code]), empty(rows, np.float32)
    entry = "add_rms_norm_codes" if adds else "rms_norm_codes"
    variant = KERNELS[entry].variant(
        **options(dtype, VX_VEC=vector_width(width), VX_CODE=CODES[code], VX_GROUPS=0)
    )
    inputs = [x, residual, weight] if adds else [x, weight]
    arguments = [*inputs, codes.view(np.uint8), scales, width, 1e-5, 0.0, 0]
    emulator.launch(variant, {"rows": rows, "width": width}, arguments)
    total = wide(x)
    if adds:
        rounded = (x.astype(np.float32) + before.astype(np.float32)).astype(x.dtype)
        np.testing.assert_array_equal(residual, rounded)
        total = wide(rounded)
    root = np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-5)
    check_codes(codes, scales, total / root * wide(weight), code)


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 33), ("f16", 35), ("f32", 515)])
def test_one_row_of_codes(emulator: Emulator, dtype: str, width: int) -> None:
    x = normal(np.random.default_rng(width), (1, width), dtype)
    codes, scales = empty(x.shape, np.int8), empty(1, np.float32)
    chosen = options(dtype, VX_VEC=1, VX_CODE=CODES["i8"], VX_GROUPS=0)
    arguments = [x, codes.view(np.uint8), scales, width, 0.0, 0]
    sizes = {"rows": 1, "width": width}
    emulator.launch(KERNELS["quantize_rows"].variant(**chosen), sizes, arguments)
    check_codes(codes, scales, wide(x), "i8")


def fixed_codes(values: Array, scale: float) -> Array:
    """The codes in e4m3, whose greatest is 448, by one scale; what is not finite is NaN."""
    steps = values.astype(np.float32) * (np.float32(1) / np.float32(scale))
    clipped = np.where(np.isfinite(steps), np.clip(steps, -448, 448), np.nan)
    result: Array = clipped.astype(E4M3)
    return result


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 128), ("f16", 36), ("f32", 515)])
@pytest.mark.parametrize("scale", [0.003, 0.25])
def test_rows_with_a_fixed_scale(emulator: Emulator, dtype: str, width: int, scale: float) -> None:
    """Codes are equal to the bit; the smaller scale is too small for most, the greater one for
    none."""
    x = np.array(normal(np.random.default_rng(width), (4, width), dtype))
    x[1], x[2, 3], x[3, 0], x[3, 7] = 0, np.nan, np.inf, -np.inf
    x = on_device(x, x.dtype)
    codes, scales = empty(x.shape, E4M3), empty(4, np.float32)
    chosen = options(dtype, VX_VEC=vector_width(width), VX_CODE=CODES["f8e4m3"], VX_GROUPS=0)
    arguments = [x, codes.view(np.uint8), scales, width, scale, 0]
    sizes = {"rows": 4, "width": width}
    emulator.launch(KERNELS["quantize_rows"].variant(**chosen), sizes, arguments)
    want = fixed_codes(x, scale)
    assert (abs(wide(want[0])).max() == 448) == (scale < 0.01)
    np.testing.assert_array_equal(codes.astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(scales, np.full(4, scale, np.float32))


@pytest.mark.parametrize("adds", [False, True])
def test_norms_with_a_fixed_scale(emulator: Emulator, adds: bool) -> None:
    """A code is at most a step from the norm in float64: its f32 result may lie on either side."""
    rng, width, scale = np.random.default_rng(4), 264, 0.002
    x, weight = normal(rng, (3, width), "bf16"), normal(rng, (width,), "f32")
    residual = inout(np.zeros((3, width)), NUMPY_TYPES["bf16"])
    codes, scales = empty(x.shape, E4M3), empty(3, np.float32)
    entry = "add_rms_norm_codes" if adds else "rms_norm_codes"
    variant = KERNELS[entry].variant(
        **options("bf16", VX_VEC=8, VX_CODE=CODES["f8e4m3"], VX_GROUPS=0)
    )
    inputs = [x, residual, weight] if adds else [x, weight]
    arguments = [*inputs, codes.view(np.uint8), scales, width, 1e-5, scale, 0]
    emulator.launch(variant, {"rows": 3, "width": width}, arguments)
    root = np.sqrt((wide(x) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    want = wide(fixed_codes(wide(x) / root * wide(weight), scale))
    differ = wide(codes) != want
    assert differ.mean() < 0.01
    np.testing.assert_allclose(wide(codes), want, rtol=0.13, atol=2**-9)
    assert (abs(want) == 448).any()
    np.testing.assert_array_equal(scales, np.full(3, scale, np.float32))


BLOCKS = {"rows": (1, 10**6), "groups": (1, 32), "blocks": (4, 48)}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("rows", "cols"), [(6, 16), (12, 80), (7, 4112)])
def test_dequantize(
    emulator: Emulator, code: str, blocks: str, dtype: str, rows: int, cols: int
) -> None:
    """Values are equal to the bit, from a row on that is no block's first."""
    rng, first = np.random.default_rng(3), 5
    block = (BLOCKS[blocks][0], min(cols, BLOCKS[blocks][1]))
    codes = random_codes(rng, (rows, cols), code)
    scales = normal(rng, (-(-rows // block[0]), -(-cols // block[1])), "f32")
    y = empty((rows - first, cols), NUMPY_TYPES[dtype])
    variant = KERNELS["codes8_dequantize"].variant(
        **options(dtype, VX_CODE=CODES[code], VX_TOKENS=1, VX_OUT=0)
    )
    arguments = [
        on_device(codes[first:], codes.dtype),
        as_stored(scales, block),
        y,
        cols,
        first,
        *block,
    ]
    emulator.launch(variant, {"rows": rows - first, "width": cols}, arguments)
    want = scaled(codes, scales, block)[first:].astype(y.dtype)
    np.testing.assert_array_equal(y.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "tokens", "tile", "out"),
    [
        ("bf16", 1, 1, 0),
        ("f16", 5, 2, 0),
        ("f32", 7, 4, 1),
        ("bf16", 3, 1, 0),
        ("f16", 1, 2, 0),
        ("f32", 1, 4, 1),
    ],
)
def test_gemv(
    emulator: Emulator, code: str, blocks: str, dtype: str, tokens: int, tile: int, out: int
) -> None:
    small = tokens < tile or (tokens, tile) == (3, 1)
    rng, (outputs, cols) = np.random.default_rng(7), (1, 16) if small else (7, 2064)
    block = (BLOCKS[blocks][0], min(cols, BLOCKS[blocks][1]))
    codes = random_codes(rng, (outputs, cols), code)
    scales = on_device(
        rng.standard_normal((-(-outputs // block[0]), -(-cols // block[1]))) / 100, np.float32
    )
    x, bias = normal(rng, (tokens, cols), dtype), None if small else normal(rng, (7,), "f32")
    y = empty((tokens, outputs + 2), np.float32 if out else x.dtype)
    y[:, outputs:] = 7
    variant = KERNELS["codes8_gemv"].variant(
        **options(dtype, VX_CODE=CODES[code], VX_TOKENS=tile, VX_OUT=out)
    )
    arguments = [x, codes.view(np.uint8), as_stored(scales, block), bias, y, tokens, outputs, cols,
                 outputs + 2, *block]  # fmt: skip
    emulator.launch(variant, {"tokens": tokens, "outputs": outputs}, arguments)
    assert (y[:, outputs:] == 7).all()
    values = wide(codes) * wide(scaled(np.ones_like(codes, np.float32), scales, block))
    want = wide(x) @ values.T + (0 if bias is None else wide(bias))
    limit = "f32" if out else dtype
    assert_near(y[:, :outputs], want, limit, scale=abs(want).max() + 1 if out else 1)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("dtype", "out", "biased"), [("bf16", 0, True), ("f16", 1, False), ("f32", 0, True)]
)
@pytest.mark.parametrize(("tokens", "outputs"), [(1, 1), (2, 257), (3, 300)])
def test_rescale(
    emulator: Emulator, code: str, dtype: str, out: int, biased: bool, tokens: int, outputs: int
) -> None:
    rng = np.random.default_rng(5)
    sums = on_device(
        rng.integers(-(10**6), 10**6, (tokens, outputs)), np.int32 if code == "i8" else np.float32
    )
    x_scales, w_scales = (on_device(rng.random(n) / 1000, np.float32) for n in (tokens, outputs))
    bias = normal(rng, (outputs,), "f32") if biased else None
    y = empty((tokens, outputs + 5), np.float32 if out else NUMPY_TYPES[dtype])
    y[:, outputs:] = 7
    variant = KERNELS["codes8_rescale"].variant(
        **options(dtype, VX_CODE=CODES[code], VX_TOKENS=1, VX_OUT=out)
    )
    arguments = [sums, x_scales, w_scales, bias, y, outputs, outputs + 5]
    emulator.launch(variant, {"tokens": tokens, "outputs": outputs}, arguments)
    assert (y[:, outputs:] == 7).all()
    want = wide(sums) * wide(x_scales)[:, None] * wide(w_scales)
    if bias is not None:
        want = want + wide(bias)
    assert_near(y[:, :outputs], want, "f32" if out else dtype, scale=2)


MMA = [  # dtype, blocks, tokens, outputs, inputs, tiles, rows, splits, out
    ("bf16", "blocks", 1, 40, 1040, 1, 1, 1, 0),
    ("f16", "blocks", 7, 33, 2064, 1, 2, 1, 1),
    ("bf16", "rows", 13, 16, 64, 2, 2, 1, 0),
    ("f16", "rows", 17, 50, 1072, 4, 2, 2, 1),
    ("bf16", "halves", 9, 31, 592, 2, 1, 1, 1),
    ("bf16", "blocks", 64, 150, 272, 8, 2, 1, 1),
    ("f16", "halves", 35, 24, 96, 4, 1, 1, 0),  # two passes
    ("bf16", "blocks", 2, 16, 5120, 1, 1, 4, 1),  # rings that are filled more than once
    ("bf16", "tensor", 33, 64, 4112, 8, 2, 2, 0),
    ("f16", "blocks", 1, 17, 16, 1, 1, 1, 0),
    ("bf16", "blocks", 1, 1, 16, 1, 1, 1, 0),
    ("f16", "blocks", 9, 1, 80, 2, 2, 1, 1),
    ("f16", "halves", 65, 17, 64, 8, 2, 1, 0),
    ("bf16", "rows", 31, 15, 48, 4, 2, 1, 0),
]
MMA_BLOCKS = {"rows": (1, 10**6), "halves": (1, 64), "blocks": (24, 128), "tensor": (10**6, 10**6)}


@pytest.mark.parametrize(
    ("dtype", "blocks", "tokens", "outputs", "inputs", "tiles", "rows", "parts", "out"), MMA
)
def test_mma(
    emulator: Emulator,
    dtype: str,
    blocks: str,
    tokens: int,
    outputs: int,
    inputs: int,
    tiles: int,
    rows: int,
    parts: int,
    out: int,
) -> None:
    """Every code but NaN among them, subnormal ones too; scales of rows, of parts of rows, of
    blocks whose last is smaller, of all."""
    rng = np.random.default_rng(inputs)
    block = tuple(np.minimum(MMA_BLOCKS[blocks], (outputs, inputs)).tolist())
    raw = rng.integers(0, 127, (outputs, inputs)) | rng.choice([0, 128], (outputs, inputs))
    codes = on_device(raw, np.uint8)
    grid = (-(-outputs // block[0]), -(-inputs // block[1]))
    scales = on_device(rng.uniform(0.5, 2, grid) * rng.choice([-1, 1], grid) / 300, np.float32)
    x, bias = normal(rng, (tokens, inputs), dtype), normal(rng, (outputs,), "f32")
    bias = None if tokens == 1 else bias
    pitch = outputs + 3
    y = inout(np.full((tokens, pitch), 7), np.float32 if out else x.dtype)
    partial = empty((parts, tokens, outputs), np.float32) if parts > 1 else None
    arrivals = inout(np.zeros(-(-outputs // 16) * 8), np.uint32) if parts > 1 else None
    variant = KERNELS["codes8_mma"].variant(
        **options(dtype, VX_TILES=tiles, VX_ROWS=rows, VX_OUT=out, **PLAIN)
    )
    emulator.launch(
        variant, {"tokens": tokens, "outputs": outputs, "width": inputs, "splits": parts},
        [x, codes, as_stored(scales, block), bias, y, partial, arrivals, tokens, outputs, inputs,
         pitch, block[0],
         31 if block[1] == inputs else block[1].bit_length() - 1, *NOTHING_FUSED],
    )  # fmt: skip
    if arrivals is not None:
        assert not arrivals.any()  # ready for the next product
    np.testing.assert_array_equal(y[:, outputs:], 7)
    whole = wide(scaled(np.ones((outputs, inputs), np.float32), scales, block))  # type: ignore[arg-type]
    values = wide(codes.view(E4M3)) * whole
    want = wide(x) @ values.T + (0 if bias is None else wide(bias))
    # sums of products that are as large as this
    magnitude = (abs(wide(x)) @ abs(values).T).max()
    assert_near(y[:, :outputs], want, "f32" if out else dtype, scale=magnitude if out else 2)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("f16", 8),
        ("bf16", 128),
        ("bf16", 132),
        ("f16", 400),
        ("bf16", 2064),
    ],
)
@pytest.mark.parametrize("source", ["x", "norm", "sum and norm"])
def test_scales_of_128_columns(emulator: Emulator, dtype: str, width: int, source: str) -> None:
    """Each group as if it were a row, its scale beside other rows'; the last one smaller."""
    rng, rows, pitch = np.random.default_rng(width), 5, 8
    x = np.array(normal(rng, (rows, width), dtype))
    if source == "x":
        x[1, :100], x[3, -1] = 0, np.inf
    x = on_device(x, x.dtype)
    weight = normal(rng, (width,), "f32")
    residual = inout(rng.standard_normal((rows, width)), x.dtype)
    before = residual.copy()
    groups = -(-width // 128)
    codes, scales = empty(x.shape, E4M3), inout(np.full((groups, pitch), 7), np.float32)
    entry = {"x": "quantize_rows", "norm": "rms_norm_codes", "sum and norm": "add_rms_norm_codes"}
    chosen = options(dtype, VX_VEC=vector_width(width), VX_CODE=CODES["f8e4m3"], VX_GROUPS=1)
    inputs = {"x": [x], "norm": [x, weight], "sum and norm": [x, residual, weight]}[source]
    eps = [] if source == "x" else [1e-5]
    arguments = [*inputs, codes.view(np.uint8), scales, width, *eps, 0.0, pitch]
    emulator.launch(
        KERNELS[entry[source]].variant(**chosen), {"rows": rows, "width": width}, arguments
    )
    np.testing.assert_array_equal(scales[:, rows:], 7)
    want = wide(x)
    if source != "x":
        if source == "sum and norm":
            want = wide((x.astype(np.float32) + before.astype(np.float32)).astype(x.dtype))
        want = want / np.sqrt((want**2).mean(axis=1, keepdims=True) + 1e-5) * wide(weight)
    for group in range(groups):
        part, columns = (
            want[:, 128 * group : 128 * group + 128],
            slice(128 * group, 128 * group + 128),
        )
        finite = np.isfinite(part).all(axis=1)
        assert (np.isnan(scales[group, :rows]) == ~finite).all()
        check_codes(codes[finite, columns], scales[group, :rows][finite], part[finite], "f8e4m3")


@pytest.mark.parametrize(
    ("dtype", "tokens", "outputs", "inputs", "out", "biased"),
    [
        ("bf16", 1, 1, 16, 0, True),
        ("f16", 131, 129, 400, 1, False),
        ("bf16", 5, 201, 528, 1, True),
        ("bf16", 77, 24, 1040, 0, False),
        ("f16", 1, 1, 16, 0, True),
    ],
)
def test_blocks(
    emulator: Emulator, dtype: str, tokens: int, outputs: int, inputs: int, out: int, biased: bool
) -> None:
    rng, groups = np.random.default_rng(inputs), -(-inputs // 128)
    x, w = (random_codes(rng, (n, inputs), "f8e4m3") for n in (tokens, outputs))
    x_pitch, pitch = -(-tokens // 4) * 4, outputs + 3
    x_scales = on_device(rng.uniform(0.5, 2, (groups, x_pitch)) / 100, np.float32)
    w_scales = on_device(rng.uniform(-2, 2, (-(-outputs // 128), groups)) / 100, np.float32)
    bias = normal(rng, (outputs,), "f32") if biased else None
    y = inout(np.full((tokens, pitch), 7), np.float32 if out else NUMPY_TYPES[dtype])
    variant = KERNELS["codes8_blocks"].variant(**options(dtype, VX_OUT=out))
    emulator.launch(
        variant, {"tokens": tokens, "outputs": outputs, "width": inputs},
        [x.view(np.uint8), x_scales, w.view(np.uint8), as_stored(w_scales, (128, 128)), bias, y,
         tokens, outputs, inputs, x_pitch, pitch],
    )  # fmt: skip
    np.testing.assert_array_equal(y[:, outputs:], 7)
    left = wide(x) * wide(np.repeat(x_scales[:, :tokens].T, 128, 1)[:, :inputs])
    right = wide(w) * wide(scaled(np.ones((outputs, inputs), np.float32), w_scales, (128, 128)))  # type: ignore[arg-type]
    want = left @ right.T + (0 if bias is None else wide(bias))
    magnitude = (abs(left) @ abs(right).T).max()
    assert_near(y[:, :outputs], want, "f32" if out else dtype, scale=magnitude if out else 2)
