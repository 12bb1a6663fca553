"""Sums over ranks that read each other's memory, in one launch."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.norms import ROW_OPTIONS, row_block
from vllmx_cuda.kernel_specs.types import Kernel, Launch, Options, Sizes, arguments, at_least

MAX_RANKS = 8
"""RANKS in one_shot.cu."""
_MOST_THREADS = 512
_MOST_BLOCKS = 16
"""The blocks of a processor, at most, on every architecture."""
_PEERS = (
    "in u64* peers, inout u32* stop, i32 width,{} i32 blocks, i32 slot, i32 rank, i32 ranks,"
    " u32 patience"
)


def parts_at(blocks: int) -> int:
    """Bytes of words in what a rank shares, before the parts."""
    return -(-4 * blocks * (1 + MAX_RANKS) // 256) * 256


def _threads(width: int, vec: int) -> int:
    return min(_MOST_THREADS, row_block(width, vec))


def blocks_at_once(width: int, vec: int, num_processors: int) -> int:
    """How many rows of this width are under way at once for certain."""
    return num_processors * min(_MOST_BLOCKS, _MOST_THREADS // _threads(width, vec))


def _block_a_row(sizes: Sizes, options: Options) -> Launch:
    at_least("rows", sizes["rows"], 1)
    at_least("width", sizes["width"], 1)
    return Launch((sizes["rows"], 1, 1), _threads(sizes["width"], options["VX_VEC"]))


ONE_SHOT_SUM = Kernel(
    entry="one_shot_sum",
    source="one_shot.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* x, out elem* y, " + _PEERS.format("")),
    sizes=("rows", "width"),
    rule=_block_a_row,
    meets=True,
)
ONE_SHOT_NORM = Kernel(
    entry="one_shot_norm",
    source="one_shot.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "in elem* x, inout elem* residual, in f32* weight, out elem* y, "
        + _PEERS.format(" f32 eps,")
    ),
    sizes=("rows", "width"),
    rule=_block_a_row,
    meets=True,
)

KERNELS = (ONE_SHOT_SUM, ONE_SHOT_NORM)
