"""Weights and activations as codes of 8 bits, int8 or FP8 e4m3, with scales in float32."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.norms import one_block_a_row
from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    FUSED,
    FUSIONS,
    HALF_DTYPES,
    ROW_OPTIONS,
    Launch,
    Options,
    Sizes,
    along_rows,
    at_least,
    block_rows,
    by_outputs,
    ceil_div,
    kernel,
    multiple_of,
)
from vllmx_cuda.kernel_specs.w4 import ROW_TILES, TILES, WARPS

CODES = {"i8": 0, "f8e4m3": 1}
"""Values of VX_CODE."""
GEMV_TOKENS = (1, 2, 4)
"""Values of VX_TOKENS: tokens that share one pass over the weights."""
STEP = 16
"""Codes that a thread takes at once: K and the columns of a block are multiples of it."""
MMA_COLS = 64
"""Columns that codes8_mma has one scale for at a time."""
GROUP = 128
"""Columns that have a scale with VX_GROUPS 1, and columns and rows of a weight's block."""
BLOCK = 128
"""Tokens and outputs of a block of codes8_blocks."""
E4M3_ARCHITECTURES = (89, 120, 121)
"""The architectures whose `mma` multiplies FP8. sm_90 and sm_100 have other instructions for it."""
_CODE_OPTIONS = {**ROW_OPTIONS, "VX_CODE": tuple(CODES.values()), "VX_GROUPS": (0, 1)}
_LINEAR_OPTIONS = {
    "VX_DTYPE": ANY_DTYPE,
    "VX_CODE": tuple(CODES.values()),
    "VX_TOKENS": GEMV_TOKENS,
    "VX_OUT": (0, 1),
}


def _coded_rows(sizes: Sizes, options: Options) -> Launch:
    if options["VX_GROUPS"]:
        at_least("VX_VEC, with groups of columns,", options["VX_VEC"], 4)
    return one_block_a_row(sizes, options)


def _blocks(sizes: Sizes, options: Options) -> Launch:
    at_least("tokens", sizes["tokens"], 1)
    multiple_of("width", sizes["width"], STEP)
    grid = (ceil_div(sizes["outputs"], BLOCK), ceil_div(sizes["tokens"], BLOCK), 1)
    return Launch(grid, 256, 3 * 2 * BLOCK * GROUP)


def _dequantize(sizes: Sizes, options: Options) -> Launch:
    return along_rows(sizes, STEP, STEP * 256)


def _gemv(sizes: Sizes, options: Options) -> Launch:
    rows = 4 if options["VX_TOKENS"] == 1 else 2
    return by_outputs(sizes, rows, options["VX_TOKENS"])


def _rescale(sizes: Sizes, options: Options) -> Launch:
    at_least("tokens", sizes["tokens"], 1)
    return Launch((sizes["tokens"], ceil_div(sizes["outputs"], 256), 1), 256)


def _mma(sizes: Sizes, options: Options) -> Launch:
    for name in ("tokens", "splits", "outputs"):
        at_least(name, sizes[name], 1)
    multiple_of("width", sizes["width"], STEP)
    rows, tokens = 16 * options["VX_ROWS"], 8 * options["VX_TILES"]
    ring = (4 if options["VX_ROWS"] == 1 else 3) * rows * MMA_COLS
    blocks = ceil_div(sizes["outputs"], 16 * block_rows(sizes, options))
    grid = (blocks, ceil_div(sizes["tokens"], tokens), sizes["splits"])
    return Launch(grid, 32 * WARPS, WARPS * max(ring, tokens * (rows + 4) * 4))


CODES8_MMA = kernel(
    "codes8_mma.cu",
    "codes8_mma(in elem* x, in u8* w, in f32* scales, in f32* bias?, out out* y,"
    " inout f32* partial?, inout u32* arrivals?, i32 m, i32 n, i32 k, i32 pitch, i32 block_rows,"
    f" i32 group_shift,{FUSED}",
    "tokens outputs width splits",
    _mma,
    {
        "VX_DTYPE": HALF_DTYPES,
        "VX_TILES": TILES,
        "VX_ROWS": ROW_TILES,
        "VX_OUT": (0, 1),
        **FUSIONS,
    },
    tensor_cores=True,
    early=("w",),
)

KERNELS = (
    kernel(
        "quantize_rows.cu",
        "quantize_rows(in elem* x, out u8* codes, out f32* scales, i32 width, f32 fixed,"
        " i32 pitch)",
        "rows width",
        _coded_rows,
        _CODE_OPTIONS,
    ),
    kernel(
        "rms_norm_codes.cu",
        "rms_norm_codes(in elem* x, in f32* weight, out u8* codes, out f32* scales, i32 width,"
        " f32 eps, f32 fixed, i32 pitch)",
        "rows width",
        _coded_rows,
        _CODE_OPTIONS,
    ),
    kernel(
        "rms_norm_codes.cu",
        "add_rms_norm_codes(in elem* x, inout elem* residual, in f32* weight, out u8* codes,"
        " out f32* scales, i32 width, f32 eps, f32 fixed, i32 pitch)",
        "rows width",
        _coded_rows,
        _CODE_OPTIONS,
    ),
    kernel(
        "codes8_linear.cu",
        "codes8_dequantize(in u8* w, in f32* scales, out elem* y, i32 k, i32 first, i32 block_rows,"
        " i32 block_cols)",
        "rows width",
        _dequantize,
        _LINEAR_OPTIONS,
    ),
    kernel(
        "codes8_linear.cu",
        "codes8_gemv(in elem* x, in u8* w, in f32* scales, in f32* bias?, out out* y, i32 m, i32 n,"
        " i32 k, i32 pitch, i32 block_rows, i32 block_cols)",
        "tokens outputs",
        _gemv,
        _LINEAR_OPTIONS,
    ),
    kernel(
        "codes8_linear.cu",
        "codes8_rescale(in u32* sums, in f32* x_scales, in f32* w_scales, in f32* bias?,"
        " out out* y, i32 n, i32 pitch)",
        "tokens outputs",
        _rescale,
        _LINEAR_OPTIONS,
    ),
    CODES8_MMA,
    kernel(
        "codes8_blocks.cu",
        "codes8_blocks(in u8* x, in f32* x_scales, in u8* w, in f32* w_scales, in f32* bias?,"
        " out out* y, i32 m, i32 n, i32 k, i32 x_pitch, i32 pitch)",
        "tokens outputs width",
        _blocks,
        {"VX_DTYPE": HALF_DTYPES, "VX_OUT": (0, 1)},
        tensor_cores=True,
        architectures=E4M3_ARCHITECTURES,
    ),
)
