"""Products of few tokens with a weight matrix (N, K); cuBLASLt does the larger ones."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    FUSED,
    FUSIONS,
    HALF_DTYPES,
    VECTORS,
    Launch,
    Options,
    Sizes,
    at_least,
    block_rows,
    by_outputs,
    ceil_div,
    kernel,
    multiple_of,
)

GEMV_TOKENS = (1, 2, 4, 8)
"""Values of VX_TOKENS: tokens that share one pass over the weights."""
MMA_TILES = (1, 2)
"""Values of VX_TILES: tiles of 8 tokens that share one pass over the weights."""
MMA_ROWS = (1, 2)
"""Values of VX_ROWS: tiles of 8 outputs that share the tokens' fragments."""
MMA_K = 32
"""linear_mma needs K to be a multiple of it."""
MMA_TOKENS = 8 * MMA_TILES[-1]
"""Tokens that one pass of linear_mma serves at most."""
SPLIT_BLOCKS = 256
"""Blocks of a product that is split at most: more than any GPU has processors."""
_GEMV_ROWS = 4
MMA_OUTPUTS = 8
"""Outputs of a tile of linear_mma."""
_LEAST_COLS = 2048
"""Columns that a block has after splitting: 8 warps' rings, filled once."""


def row_tiles(outputs: int, num_processors: int) -> int:
    """VX_ROWS: 16 outputs a block halve the reads of the tokens; with 8 of them fewer outputs make
    a block for each processor."""
    return 2 if ceil_div(outputs, 2 * MMA_OUTPUTS) > num_processors else 1


def splits(outputs: int, width: int, num_processors: int) -> int:
    """Blocks that share an output of linear_mma: more than one where half of the processors or more
    would have none, and what is taken off a block takes longer than adding the sums. The number of
    tokens does not matter, so that it cannot change the order of sums."""
    blocks, found = ceil_div(outputs, MMA_OUTPUTS), 1
    most = min(num_processors, SPLIT_BLOCKS)
    while 2 * found * blocks <= most and width >= 2 * found * _LEAST_COLS:
        found *= 2
    return found


def _gemv(sizes: Sizes, options: Options) -> Launch:
    return by_outputs(sizes, _GEMV_ROWS, options["VX_TOKENS"])


def _mma(sizes: Sizes, options: Options) -> Launch:
    at_least("splits", sizes["splits"], 1)
    assert sizes["splits"].bit_count() == 1, sizes
    multiple_of("width", sizes["width"], MMA_K)
    rows, tokens = MMA_OUTPUTS * block_rows(sizes, options), 8 * options["VX_TILES"]
    x, y, _ = by_outputs(sizes, rows, tokens).grid
    return Launch((x, y, sizes["splits"]), 256)


LINEAR_GEMV = kernel(
    "linear_gemv.cu",
    "linear_gemv(in elem* x, in elem* w, in f32* bias?, out out* y, i32 m, i32 n, i32 k,"
    " i32 pitch)",
    "tokens outputs",
    _gemv,
    {
        "VX_DTYPE": ANY_DTYPE,
        "VX_VEC": VECTORS,
        "VX_TOKENS": GEMV_TOKENS,
        "VX_OUT": (0, 1),
    },
)
LINEAR_MMA = kernel(
    "linear_mma.cu",
    "linear_mma(in elem* x, in elem* w, in f32* bias?, out out* y, inout f32* partial?,"
    f" inout u32* arrivals?, i32 m, i32 n, i32 k, i32 pitch,{FUSED}",
    "tokens outputs width splits",
    _mma,
    {
        "VX_DTYPE": HALF_DTYPES,
        "VX_TILES": MMA_TILES,
        "VX_ROWS": MMA_ROWS,
        "VX_OUT": (0, 1),
        **FUSIONS,
    },
    tensor_cores=True,
    early=("w",),
)
KERNELS = (
    LINEAR_GEMV,
    LINEAR_MMA,
)
