"""Elementwise and row kernels: activations, sums, gathers."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    ROW_OPTIONS,
    Kernel,
    Launch,
    Options,
    Sizes,
    at_least,
    ceil_div,
    kernel,
)

GATES = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "sigmoid": 4,
    "identity": 5,
    "tanh": 6,
    "relu2": 7,
}
"""Values of VX_ACT."""
GATED = ("silu", "gelu", "gelu_tanh", "relu")
ACTIVATIONS = {kind: GATES[kind] for kind in (*GATED, "tanh", "relu2")}
"""Activations without a gate; gated layers use `GATED`."""
_THREADS = 256


def by_rows(sizes: Sizes, options: Options) -> Launch:
    """Launch rule: the grid is rows x blocks of a row's features."""
    at_least("rows", sizes["rows"], 1)
    pieces = ceil_div(sizes["width"], _THREADS * options["VX_VEC"])
    return Launch((sizes["rows"], pieces, 1), _THREADS)


def flat(sizes: Sizes, options: Options) -> Launch:
    """Launch rule: a thread for every VX_VEC elements."""
    at_least("count", sizes["count"], 1)
    return Launch((ceil_div(sizes["count"], _THREADS * options["VX_VEC"]), 1, 1), _THREADS)


def row_kernel(source: str, signature: str, **options: tuple[int, ...]) -> Kernel:
    """A kernel with the launch rule `by_rows`."""
    return kernel(source, signature, "rows width", by_rows, {**ROW_OPTIONS, **options})


def flat_kernel(source: str, signature: str, **options: tuple[int, ...]) -> Kernel:
    """A kernel with the launch rule `flat`."""
    return kernel(source, signature, "count", flat, {**ROW_OPTIONS, **options})


def _begin(sizes: Sizes, options: Options) -> Launch:
    at_least("count", sizes["count"], 1)
    entries = max(sizes["count"], sizes["patches"])
    return Launch((ceil_div(entries, _THREADS), 1, 1), _THREADS)


KERNELS = (
    row_kernel(
        "gated_act.cu",
        "gated_act(in elem* gate_up, out elem* y, i32 width)",
        VX_ACT=tuple(GATES[kind] for kind in GATED),
    ),
    row_kernel(
        "gated_act.cu",
        "activation(in elem* x, out elem* y, i32 width)",
        VX_ACT=tuple(ACTIVATIONS.values()),
    ),
    flat_kernel("elementwise.cu", "add(in elem* x, in elem* y, out elem* z, u64 count)"),
    flat_kernel("elementwise.cu", "scale(in elem* x, out elem* y, u64 count, f32 factor)"),
    row_kernel(
        "scale_at.cu",
        "scale_at(in elem* x, in f32* table, in i32* positions, out elem* y, i32 width,"
        " i32 features)",
    ),
    row_kernel("scale_by.cu", "scale_by(in elem* x, in f32* w, out elem* y, i32 width, i32 span)"),
    row_kernel("clip.cu", "clip(in elem* x, in f32* bounds, out elem* y, i32 width, i32 pitch)"),
    row_kernel(
        "gate.cu",
        "gate(in elem* x, in gate_elem* g, out elem* y, i32 width, i32 span)",
        VX_ACT=tuple(GATES.values()),
        VX_WIDE=(0, 1),
    ),
    flat_kernel("elementwise.cu", "softcap(inout f32* logits, u64 count, f32 cap)"),
    row_kernel("gather.cu", "gather_rows(in i32* ids, in elem* table, out elem* y, i32 width)"),
    row_kernel(
        "gather.cu",
        "spread(in f32* x, in f32* sources, out f32* y, i32 width, i32 reduced)",
        VX_VEC=(1,),
    ),
    row_kernel(
        "gather.cu",
        "resize(in elem* x, out elem* y, i32 width, i32 pitch, i32 kept, i32 size, i32 resized)",
    ),
    row_kernel(
        "pool.cu", "pool_mean(in elem* x, in i32* first, in i32* last, out elem* y, i32 width)"
    ),
    row_kernel(
        "gather.cu",
        "gather_columns(in elem* x, in i32* columns, out elem* y, i32 width, i32 pitch)",
        VX_VEC=(1,),
    ),
    kernel(
        "gather.cu",
        "begin_step(inout i32* tokens, in i32* sampled, inout i32* block_table, in i32* patches,"
        " i32 count, i32 num_patches)",
        "count patches",
        _begin,
        ROW_OPTIONS,
    ),
)
