"""Norms: one block a row, a thread `VX_VEC` neighbouring elements at a time."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    ROW_OPTIONS,
    Launch,
    Options,
    Sizes,
    at_least,
    ceil_div,
    kernel,
)


def row_block(width: int, vec: int) -> int:
    """Threads for one row: about two vectors each, whole warps, 32 to 1024."""
    return min(1024, max(32, 32 * ceil_div(width, 64 * vec)))


def one_block_a_row(sizes: Sizes, options: Options) -> Launch:
    at_least("rows", sizes["rows"], 1)
    at_least("width", sizes["width"], 1)
    return Launch((sizes["rows"], 1, 1), row_block(sizes["width"], options["VX_VEC"]))


def head_runs(heads: int, kv_heads: int, across: bool) -> int:
    """Norms of a token's heads: see head_norm.cu."""
    return 2 + kv_heads if across else heads + 2 * kv_heads


def _head_norm(sizes: Sizes, options: Options) -> Launch:
    at_least("rows", sizes["rows"], 1)
    at_least("width", sizes["width"], 1)
    threads = row_block(sizes["width"], options["VX_VEC"])
    return Launch((sizes["rows"], sizes["runs"], 1), threads)


KERNELS = (
    kernel(
        "rms_norm.cu",
        "rms_norm(in elem* x, in f32* weight, out elem* y, i32 width, f32 eps)",
        "rows width",
        one_block_a_row,
        ROW_OPTIONS,
    ),
    kernel(
        "rms_norm.cu",
        "add_rms_norm(in elem* x, inout elem* residual, in f32* weight, out elem* y, i32 width,"
        " f32 eps)",
        "rows width",
        one_block_a_row,
        ROW_OPTIONS,
    ),
    kernel(
        "layer_norm.cu",
        "layer_norm(in elem* x, in f32* weight, in f32* bias?, out elem* y, i32 width, f32 eps)",
        "rows width",
        one_block_a_row,
        ROW_OPTIONS,
    ),
    kernel(
        "magnitude.cu",
        "match_rms(in elem* x, in elem* other, out elem* y, i32 width, f32 floor)",
        "rows width",
        one_block_a_row,
        ROW_OPTIONS,
    ),
    kernel(
        "magnitude.cu",
        "sparsify(in elem* x, out elem* y, i32 width, f32 deviations)",
        "rows width",
        one_block_a_row,
        ROW_OPTIONS,
    ),
    kernel(
        "head_norm.cu",
        "head_norm(in elem* qkv, in f32* q_norm?, in f32* k_norm?, out elem* out, i32 heads,"
        " i32 kv_heads, i32 size, i32 across, i32 layer, i32 values, f32 eps)",
        "rows runs width",
        _head_norm,
        ROW_OPTIONS,
    ),
)
