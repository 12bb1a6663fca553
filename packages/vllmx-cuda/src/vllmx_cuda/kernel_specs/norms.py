"""Norms: one block a row, a thread `VX_VEC` neighbouring elements at a time."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    DTYPES,
    Kernel,
    Launch,
    Options,
    Sizes,
    arguments,
    at_least,
    ceil_div,
)

ROW_OPTIONS = {"VX_DTYPE": tuple(DTYPES.values()), "VX_VEC": (8, 4, 2, 1)}


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


RMS_NORM = Kernel(
    entry="rms_norm",
    source="rms_norm.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* x, in f32* weight, out elem* y, i32 width, f32 eps"),
    sizes=("rows", "width"),
    rule=one_block_a_row,
)

ADD_RMS_NORM = Kernel(
    entry="add_rms_norm",
    source="rms_norm.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "in elem* x, inout elem* residual, in f32* weight, out elem* y, i32 width, f32 eps"
    ),
    sizes=("rows", "width"),
    rule=one_block_a_row,
)

LAYER_NORM = Kernel(
    entry="layer_norm",
    source="layer_norm.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "in elem* x, in f32* weight, in f32* bias?, out elem* y, i32 width, f32 eps"
    ),
    sizes=("rows", "width"),
    rule=one_block_a_row,
)

HEAD_NORM = Kernel(
    entry="head_norm",
    source="head_norm.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "in elem* qkv, in f32* q_norm?, in f32* k_norm?, out elem* out, i32 heads, i32 kv_heads,"
        " i32 size, i32 across, i32 layer, i32 values, f32 eps"
    ),
    sizes=("rows", "runs", "width"),
    rule=_head_norm,
)

KERNELS = (RMS_NORM, ADD_RMS_NORM, LAYER_NORM, HEAD_NORM)
