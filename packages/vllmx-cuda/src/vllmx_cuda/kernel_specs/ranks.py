"""Kernels for several ranks: vocabularies and experts in parts, and sums in shared memory."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.norms import row_block
from vllmx_cuda.kernel_specs.rows import flat_kernel, row_kernel
from vllmx_cuda.kernel_specs.types import (
    ROW_OPTIONS,
    Launch,
    Options,
    Sizes,
    at_least,
    kernel,
)

MAX_RANKS = 8
"""RANKS in one_shot.cu."""
_MOST_THREADS = 512
_MOST_BLOCKS = 16
"""The most blocks per processor on every architecture."""
_PEERS = (
    "in u64* peers, inout u32* stop, i32 width,{} i32 blocks, i32 slot, i32 rank, i32 ranks,"
    " u32 patience"
)


def parts_at(blocks: int) -> int:
    """Bytes of flags before the rows in a rank's shared memory."""
    return -(-4 * blocks * (1 + MAX_RANKS) // 256) * 256


def _threads(width: int, vec: int) -> int:
    return min(_MOST_THREADS, row_block(width, vec))


def blocks_at_once(width: int, vec: int, num_processors: int) -> int:
    """The number of rows of this width whose blocks are sure to run at the same time."""
    return num_processors * min(_MOST_BLOCKS, _MOST_THREADS // _threads(width, vec))


def _block_a_row(sizes: Sizes, options: Options) -> Launch:
    at_least("rows", sizes["rows"], 1)
    at_least("width", sizes["width"], 1)
    return Launch((sizes["rows"], 1, 1), _threads(sizes["width"], options["VX_VEC"]))


KERNELS = (
    flat_kernel(
        "ranks.cu",
        "own_ids(in i32* ids, out i32* rows, u64 count, i32 first, i32 total)",
        VX_VEC=(1,),
    ),
    row_kernel("ranks.cu", "keep_own(in i32* ids, inout elem* y, i32 width, i32 first, i32 total)"),
    row_kernel("ranks.cu", "join_columns(in elem* part, out elem* y, i32 width, i32 pitch)"),
    row_kernel(
        "ranks.cu",
        "add_held(in elem* parts, in i32* ids, out elem* y, i32 width, i32 chosen, i32 experts,"
        " i32 ranks)",
    ),
    kernel(
        "one_shot.cu",
        "one_shot_sum(in elem* x, out elem* y, " + _PEERS.format("") + ")",
        "rows width",
        _block_a_row,
        ROW_OPTIONS,
        meets=True,
    ),
    kernel(
        "one_shot.cu",
        "one_shot_norm(in elem* x, inout elem* residual, in f32* weight, out elem* y, "
        + _PEERS.format(" f32 eps,")
        + ")",
        "rows width",
        _block_a_row,
        ROW_OPTIONS,
        meets=True,
    ),
)
