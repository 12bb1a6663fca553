"""Weights of 4-, 6- or 8-bit integers in the order of tensor-core fragments."""

from __future__ import annotations

from vllmx_core.errors import ConfigError

from vllmx_cuda.kernel_specs.gguf import BLOCKS
from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    DTYPES,
    FUSED,
    FUSIONS,
    HALF_DTYPES,
    Launch,
    Options,
    Sizes,
    along_rows,
    at_least,
    at_most,
    block_rows,
    ceil_div,
    kernel,
)

TILES = (1, 2, 4, 8)
"""Values of VX_TILES: tiles of 8 tokens that share one pass over the weights."""
TOKENS = 8 * TILES[-1]
"""Tokens that one pass serves at most."""
ROW_TILES = (1, 2)
"""Values of VX_ROWS: tiles of 16 rows that share the tokens' fragments."""
ZERO_MIDDLE, ZERO_CODES, MINIMA = 0, 1, 2
"""Values of VX_ZERO: zero is 8 or 128; one of u8 a group; a minimum in its place."""
TILE_ROWS, TILE_COLS, GROUP_COLS = 16, 64, 32
"""The rows and columns of a tile, and what K is a multiple of: the fewest columns of a group, but
for 6 bits."""
ONE_GROUP = 31
"""A group_shift, of rows with one scale."""
TRANSPOSED, PACKED_ROWS, PACKED_COLUMNS = 0, 1, 2
"""Values of VX_PACKED: how a checkpoint's words hold integers, see `kernels/w4_repack_words.cu`."""
BLOCK_FORMS = {
    "q4_0": (4, ZERO_MIDDLE, 5),
    "q4_1": (4, MINIMA, 5),
    "q4_k": (4, MINIMA, 5),
    "q6_k": (6, ZERO_MIDDLE, 4),
    "q8_0": (8, ZERO_MIDDLE, 5),
}
"""GGUF's types that lie in this order -> VX_BITS, VX_ZERO, group_shift; their factors are f16."""
WARPS = 8
_FEWER_TILES = 4
_LEAST_TILES = 4
"""The fewest tiles of columns that a warp has after splitting."""


def tile_bytes(bits: int) -> int:
    return TILE_ROWS * TILE_COLS * bits // 8


def record_bytes(scale: int, zero: int) -> int:
    """Bytes of the factors of 16 rows in one group."""
    scales = TILE_ROWS * (4 if scale == DTYPES["f32"] else 2)
    return scales + {ZERO_MIDDLE: 0, ZERO_CODES: TILE_ROWS, MINIMA: scales}[zero]


def token_tiles(tokens: int, zero: int, folds: int, arch: int) -> int:
    """VX_TILES for so many tokens. Minima and groups of 32 take registers, and sm_75 has little
    shared memory: with them 32 tokens share a pass."""
    most = _FEWER_TILES if zero == MINIMA or folds > 1 or arch < 80 else TILES[-1]
    return next((tiles for tiles in TILES if tokens <= 8 * tiles and tiles <= most), most)


def row_tiles(tokens: int) -> int:
    """VX_ROWS: from a few tokens on their fragments are worth being used twice."""
    return 1 if tokens <= 2 else 2


def folds(group_shift: int) -> int:
    """VX_FOLDS: how many groups a tile may lie in."""
    return max(1, TILE_COLS >> group_shift)


def splits(outputs: int, width: int, num_processors: int) -> int:
    """Blocks that share a row of tiles: more than one where the rows alone leave processors without
    work. The number of tokens does not matter, so that it cannot change the order of sums."""
    blocks = ceil_div(outputs, TILE_ROWS * ROW_TILES[-1])
    tiles, found = ceil_div(width, TILE_COLS), 1
    while 2 * found * blocks <= num_processors and tiles >= 2 * found * WARPS * _LEAST_TILES:
        found *= 2
    return found


def arrival_count(tokens: int, outputs: int) -> int:
    """Counters that a split product of at most so many tokens uses."""
    return (ceil_div(outputs, TILE_ROWS) + 1) * ceil_div(tokens, TOKENS)


def _check(sizes: Sizes) -> None:
    at_least("rows", sizes["outputs"], 1)
    if sizes["width"] % GROUP_COLS:
        raise ConfigError(
            f"W4 kernels need rows of a multiple of {GROUP_COLS} values, got {sizes['width']}",
            param="width",
        )


def _linear(sizes: Sizes, options: Options) -> Launch:
    _check(sizes)
    for name in ("tokens", "splits"):
        at_least(name, sizes[name], 1)
    if options["VX_ZERO"] == MINIMA or options["VX_FOLDS"] > 1:
        why = "registers, with minima or groups of 32"
        at_most("VX_TILES", options["VX_TILES"], _FEWER_TILES, why)
    rows, tokens = TILE_ROWS * options["VX_ROWS"], 8 * options["VX_TILES"]
    if (options["VX_BITS"] == 6) != (options["VX_FOLDS"] == 4):
        raise ConfigError("6 bits and groups of 16 columns (VX_FOLDS=4) only go together")
    stages = max(3, 32 // (options["VX_BITS"] * options["VX_ROWS"]))
    record = record_bytes(options["VX_SCALE"], options["VX_ZERO"])
    tile = tile_bytes(options["VX_BITS"]) + options["VX_FOLDS"] * record
    ring = stages * options["VX_ROWS"] * tile
    sums = tokens * (rows + 4) * 4
    blocks = ceil_div(sizes["outputs"], TILE_ROWS * block_rows(sizes, options))
    grid = (blocks, ceil_div(sizes["tokens"], tokens), sizes["splits"])
    return Launch(grid, 32 * WARPS, WARPS * max(ring, sums))


def _dequantize(sizes: Sizes, options: Options) -> Launch:
    _check(sizes)
    tiles = ceil_div(sizes["width"], TILE_COLS)
    return Launch((ceil_div(sizes["outputs"], TILE_ROWS), ceil_div(tiles, WARPS), 1), 32 * WARPS)


def _repack(sizes: Sizes, options: Options) -> Launch:
    if sizes["outputs"] % TILE_ROWS:
        raise ConfigError(f"repacked rows come by {TILE_ROWS}, got {sizes['outputs']}")
    return _dequantize(sizes, options)


def _gather(sizes: Sizes, options: Options) -> Launch:
    return along_rows(sizes, GROUP_COLS, 8 * 256)


_OPTIONS = {
    "VX_DTYPE": ANY_DTYPE,
    "VX_BITS": (4, 6, 8),
    "VX_SCALE": ANY_DTYPE,
    "VX_ZERO": (ZERO_MIDDLE, ZERO_CODES, MINIMA),
}

W4_LINEAR = kernel(
    "w4_linear.cu",
    "w4_linear(in elem* x, in u8* data, in f32* bias?, out out* y, inout f32* partial?,"
    f" inout u32* arrivals?, i32 m, i32 n, i32 k, i32 pitch, i32 group_shift,{FUSED}",
    "tokens outputs width splits",
    _linear,
    {
        **_OPTIONS,
        "VX_DTYPE": HALF_DTYPES,
        "VX_TILES": TILES,
        "VX_ROWS": ROW_TILES,
        "VX_FOLDS": (1, 2, 4),
        "VX_OUT": (0, 1),
        **FUSIONS,
    },
    tensor_cores=True,
    early=("data",),
)


KERNELS = (
    W4_LINEAR,
    kernel(
        "w4_dequantize.cu",
        "w4_dequantize(in u8* data, out elem* y, i32 n, i32 k, i32 group_shift)",
        "outputs width",
        _dequantize,
        _OPTIONS,
    ),
    kernel(
        "w4_dequantize.cu",
        "w4_gather(in u8* data, in i32* ids, out elem* y, i32 k, i32 group_shift)",
        "rows width",
        _gather,
        _OPTIONS,
    ),
    kernel(
        "w4_repack_blocks.cu",
        "w4_repack_blocks(in u8* blocks, out u8* data, inout u32* fault, i32 k)",
        "outputs width",
        _repack,
        {"VX_BLOCK": tuple(BLOCKS[name] for name in BLOCK_FORMS)},
    ),
    kernel(
        "w4_repack_words.cu",
        "w4_repack_words(in u32* words, in u8* scales, in u8* zeros?, in i32* columns?,"
        " out u8* data, inout u32* fault, i32 k, i32 group_shift, i32 pitch, i32 scale_row_step,"
        " i32 scale_group_step, i32 zero_row_step, i32 zero_group_step, i32 zero_add)",
        "outputs width",
        _repack,
        {
            "VX_BITS": (4, 8),
            "VX_SCALE": ANY_DTYPE,
            "VX_ZERO": (ZERO_MIDDLE, ZERO_CODES),
            "VX_PACKED": (TRANSPOSED, PACKED_ROWS, PACKED_COLUMNS),
            "VX_ZERO_BYTES": (0, 1),
        },
    ),
)
