"""The indexer of sparse attention: cache writes, scores, picks."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    Launch,
    Options,
    Sizes,
    at_least,
    at_most,
    ceil_div,
    kernel,
)

SPAN, CHUNK = 256, 32
MAX_SHARED = 16_000
"""Numbers of a token's queries and of a chunk's keys: with the kernel's static part 64 KiB."""
_DTYPE = {"VX_DTYPE": ANY_DTYPE}


def shared_floats(heads: int, size: int) -> int:
    """Queries of a token, and keys of a chunk."""
    return heads * size + CHUNK * (size + 1)


def _store(sizes: Sizes, options: Options) -> Launch:
    at_least("tokens", sizes["tokens"], 1)
    return Launch((sizes["tokens"], 1 + sizes["heads"], 1), 128)


def _score(sizes: Sizes, options: Options) -> Launch:
    floats = shared_floats(sizes["heads"], sizes["size"])
    at_most("queries and keys", floats, MAX_SHARED, "they take 64 KiB")
    return Launch((sizes["tokens"], ceil_div(sizes["stride"], SPAN), 1), 128, 4 * floats)


def _pick(sizes: Sizes, options: Options) -> Launch:
    at_least("tokens", sizes["tokens"], 1)
    return Launch((sizes["tokens"], 1, 1), 256)


KERNELS = (
    kernel(
        "indexer.cu",
        "index_store(in elem* q, in elem* key, in i32* positions, in i32* slots, in f32* rope,"
        " inout elem* queries, inout elem* pages, i32 heads, i32 size, i32 rotary,"
        " i32 interleaved)",
        "tokens heads",
        _store,
        _DTYPE,
    ),
    kernel(
        "indexer.cu",
        "index_score(in elem* queries, in elem* head_weights, in elem* pages, in i32* positions,"
        " in i32* items, in i32* first_item, in i32* block_table, inout f32* scores, i32 first,"
        " i32 heads, i32 size, i32 picked, i32 stride, i32 table_stride, i32 page_shift)",
        "tokens heads size stride",
        _score,
        _DTYPE,
    ),
    kernel(
        "indexer.cu",
        "index_pick(in f32* scores, in i32* positions, in i32* first_item, inout i32* picked,"
        " i32 first, i32 count, i32 stride)",
        "tokens",
        _pick,
        _DTYPE,
    ),
)
