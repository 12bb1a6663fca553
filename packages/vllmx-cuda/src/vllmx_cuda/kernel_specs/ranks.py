"""What stands around the calls between the ranks of a model."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.norms import ROW_OPTIONS
from vllmx_cuda.kernel_specs.rows import by_rows, flat
from vllmx_cuda.kernel_specs.types import Kernel, arguments

OWN_IDS = Kernel(
    entry="own_ids",
    source="ranks.cu",
    options={**ROW_OPTIONS, "VX_VEC": (1,)},
    arguments=arguments("in i32* ids, out i32* rows, u64 count, i32 first, i32 total"),
    sizes=("count",),
    rule=flat,
)
KEEP_OWN = Kernel(
    entry="keep_own",
    source="ranks.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in i32* ids, inout elem* y, i32 width, i32 first, i32 total"),
    sizes=("rows", "width"),
    rule=by_rows,
)
JOIN_COLUMNS = Kernel(
    entry="join_columns",
    source="ranks.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* part, out elem* y, i32 width, i32 pitch"),
    sizes=("rows", "width"),
    rule=by_rows,
)
ADD_HELD = Kernel(
    entry="add_held",
    source="ranks.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "in elem* parts, in i32* ids, out elem* y, i32 width, i32 chosen, i32 experts, i32 ranks"
    ),
    sizes=("rows", "width"),
    rule=by_rows,
)

KERNELS = (OWN_IDS, KEEP_OWN, JOIN_COLUMNS, ADD_HELD)
