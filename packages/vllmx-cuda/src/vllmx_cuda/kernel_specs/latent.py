"""Multi-head latent attention: cache writes, decoding, products per head."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.linear import LINEAR_GEMV
from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    Launch,
    Options,
    Sizes,
    at_least,
    at_most,
    by_outputs,
    ceil_div,
    kernel,
)

HEADS_A_BLOCK = 8
MAX_RANK = 1024
MAX_ROW = 2012
"""Numbers of a query that leave room for 1,152 static bytes in sm_75's 64 KiB."""
"""A thread of 256 has four values of an answer."""
_DTYPE = {"VX_DTYPE": ANY_DTYPE}


def _heads(sizes: Sizes, options: Options) -> Launch:
    x, y, _ = by_outputs(sizes, 4, options["VX_TOKENS"]).grid
    return Launch((x, y, sizes["heads"]), 128)


def _store(sizes: Sizes, options: Options) -> Launch:
    at_least("tokens", sizes["tokens"], 1)
    return Launch((sizes["tokens"], 1 + sizes["heads"], 1), 128)


def _decode(sizes: Sizes, options: Options) -> Launch:
    at_most("rank", sizes["rank"], MAX_RANK, "a thread has four values of an answer")
    row = sizes["rank"] + sizes["rotary"]
    at_most("rank + rotary", row, MAX_ROW, "queries and scores of 8 heads take 64 KiB")
    grid = (sizes["items"], ceil_div(sizes["heads"], HEADS_A_BLOCK), 1)
    return Launch(grid, 256, 4 * HEADS_A_BLOCK * row)


def _combine(sizes: Sizes, options: Options) -> Launch:
    return Launch((sizes["tokens"], sizes["heads"], 1), 128)


KERNELS = (
    kernel(
        LINEAR_GEMV.source,
        "heads_gemv(in elem* x, in elem* w, inout out* y, i32 m, i32 n, i32 k, i32 x_pitch,"
        " i32 x_head, i32 y_pitch, i32 y_head)",
        "tokens outputs heads",
        _heads,
        LINEAR_GEMV.options,
    ),
    kernel(
        "latent.cu",
        "latent_store(in elem* latent, in elem* q, in i32* positions, in i32* slots, in f32* norm,"
        " in f32* rope, inout elem* queries, inout elem* pages, i32 heads, i32 rank, i32 nope,"
        " i32 rotary, i32 interleaved, f32 eps)",
        "tokens heads",
        _store,
        _DTYPE,
    ),
    kernel(
        "latent.cu",
        "latent_decode(in elem* queries, in elem* pages, in i32* items, in i32* first_item,"
        " in i32* block_table, inout elem* out, inout f32* partial, inout f32* weights, i32 heads,"
        " i32 rank, i32 rotary, i32 table_stride, i32 page_shift, f32 scale, in i32* positions?,"
        " in i32* picked?, i32 num_picked)",
        "items heads rank rotary",
        _decode,
        _DTYPE,
    ),
    kernel(
        "latent.cu",
        "latent_combine(in f32* partial, in f32* weights, in i32* first_item, inout elem* out,"
        " i32 heads, i32 rank)",
        "tokens heads",
        _combine,
        _DTYPE,
    ),
)
