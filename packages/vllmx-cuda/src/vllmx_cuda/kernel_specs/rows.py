"""Rows in, rows out: activations, sums, gathers."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.norms import ROW_OPTIONS
from vllmx_cuda.kernel_specs.types import (
    Kernel,
    Launch,
    Options,
    Sizes,
    arguments,
    at_least,
    ceil_div,
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
"""Activations that stand alone; gated layers have `GATED`."""
_THREADS = 256


def by_rows(sizes: Sizes, options: Options) -> Launch:
    """A block of a row's features, a grid of them and of the rows."""
    at_least("rows", sizes["rows"], 1)
    pieces = ceil_div(sizes["width"], _THREADS * options["VX_VEC"])
    return Launch((sizes["rows"], pieces, 1), _THREADS)


def flat(sizes: Sizes, options: Options) -> Launch:
    """A thread for each VX_VEC of all elements."""
    at_least("count", sizes["count"], 1)
    return Launch((ceil_div(sizes["count"], _THREADS * options["VX_VEC"]), 1, 1), _THREADS)


def _begin(sizes: Sizes, options: Options) -> Launch:
    at_least("count", sizes["count"], 1)
    entries = max(sizes["count"], sizes["patches"])
    return Launch((ceil_div(entries, _THREADS), 1, 1), _THREADS)


GATED_ACT = Kernel(
    entry="gated_act",
    source="gated_act.cu",
    options={**ROW_OPTIONS, "VX_ACT": tuple(GATES[kind] for kind in GATED)},
    arguments=arguments("in elem* gate_up, out elem* y, i32 width"),
    sizes=("rows", "width"),
    rule=by_rows,
)
ACTIVATION = Kernel(
    entry="activation",
    source="gated_act.cu",
    options={**ROW_OPTIONS, "VX_ACT": tuple(ACTIVATIONS.values())},
    arguments=arguments("in elem* x, out elem* y, i32 width"),
    sizes=("rows", "width"),
    rule=by_rows,
)
ADD = Kernel(
    entry="add",
    source="elementwise.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* x, in elem* y, out elem* z, u64 count"),
    sizes=("count",),
    rule=flat,
)
SCALE = Kernel(
    entry="scale",
    source="elementwise.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* x, out elem* y, u64 count, f32 factor"),
    sizes=("count",),
    rule=flat,
)
SCALE_BY = Kernel(
    entry="scale_by",
    source="scale_by.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* x, in f32* w, out elem* y, i32 width, i32 span"),
    sizes=("rows", "width"),
    rule=by_rows,
)
CLIP = Kernel(
    entry="clip",
    source="clip.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* x, in f32* bounds, out elem* y, i32 width, i32 pitch"),
    sizes=("rows", "width"),
    rule=by_rows,
)
GATE = Kernel(
    entry="gate",
    source="gate.cu",
    options={**ROW_OPTIONS, "VX_ACT": tuple(GATES.values())},
    arguments=arguments("in elem* x, in elem* g, out elem* y, i32 width, i32 span"),
    sizes=("rows", "width"),
    rule=by_rows,
)
SOFTCAP = Kernel(
    entry="softcap",
    source="elementwise.cu",
    options=ROW_OPTIONS,
    arguments=arguments("inout f32* logits, u64 count, f32 cap"),
    sizes=("count",),
    rule=flat,
)
GATHER_ROWS = Kernel(
    entry="gather_rows",
    source="gather.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in i32* ids, in elem* table, out elem* y, i32 width"),
    sizes=("rows", "width"),
    rule=by_rows,
)
POOL_MEAN = Kernel(
    entry="pool_mean",
    source="pool.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* x, in i32* first, in i32* last, out elem* y, i32 width"),
    sizes=("rows", "width"),
    rule=by_rows,
)
GATHER_COLUMNS = Kernel(
    entry="gather_columns",
    source="gather.cu",
    options={**ROW_OPTIONS, "VX_VEC": (1,)},
    arguments=arguments("in elem* x, in i32* columns, out elem* y, i32 width, i32 pitch"),
    sizes=("rows", "width"),
    rule=by_rows,
)
BEGIN_STEP = Kernel(
    entry="begin_step",
    source="gather.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "inout i32* tokens, in i32* sampled, inout i32* block_table, in i32* patches, i32 count,"
        "i32 num_patches"
    ),
    sizes=("count", "patches"),
    rule=_begin,
)

KERNELS = (
    GATED_ACT,
    ACTIVATION,
    ADD,
    SCALE,
    SCALE_BY,
    CLIP,
    GATE,
    SOFTCAP,
    GATHER_ROWS,
    POOL_MEAN,
    GATHER_COLUMNS,
    BEGIN_STEP,
)
