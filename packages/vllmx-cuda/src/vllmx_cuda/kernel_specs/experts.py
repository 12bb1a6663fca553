"""Experts of a mixture: which a token goes to, products with theirs, and what stands around
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllmx_core.errors import ConfigError

from vllmx_cuda.kernel_specs.codes8 import CODES8_MMA
from vllmx_cuda.kernel_specs.linear import LINEAR_GEMV, LINEAR_MMA, MMA_K
from vllmx_cuda.kernel_specs.norms import ROW_OPTIONS
from vllmx_cuda.kernel_specs.rows import by_rows
from vllmx_cuda.kernel_specs.types import (
    DTYPES,
    Kernel,
    Launch,
    Options,
    Sizes,
    arguments,
    at_least,
    at_most,
    ceil_div,
    multiple_of,
)
from vllmx_cuda.kernel_specs.w4 import TILE_ROWS, W4_LINEAR, ZERO_CODES, ZERO_MIDDLE

SCORES = {"softmax": 0, "sigmoid": 1}
"""Values of VX_SCORE."""
MAX_EXPERTS = 1024
"""Threads of the one block that orders them."""
MAX_GROUPS = 32
"""Lanes of a warp."""
CODED_TILES = (1, 2, 4)
"""Values of VX_TILES where codes become numbers in registers, once for all tokens of a tile."""
_WARPS = 4


def max_tiles(slots: int, experts: int, width: int) -> int:
    """Tiles that so many slots can make: each expert may have one that is not full."""
    return min(slots, experts + slots // width)


def _route(sizes: Sizes, options: Options) -> Launch:
    at_least("tokens", sizes["tokens"], 1)
    experts, groups = sizes["experts"], sizes["groups"]
    at_most("experts", experts, MAX_EXPERTS, "scores lie in shared memory")
    at_most("groups", groups, MAX_GROUPS, "a lane ranks each")
    multiple_of("experts", experts, groups)
    return Launch((ceil_div(sizes["tokens"], _WARPS), 1, 1), 32 * _WARPS, 8 * _WARPS * experts)


def _order(sizes: Sizes, options: Options) -> Launch:
    at_most("experts", sizes["experts"], MAX_EXPERTS, "each has a thread of one block")
    return Launch((1, 1, 1), MAX_EXPERTS)


def _mma(sizes: Sizes, options: Options) -> Launch:
    if sizes["width"] % MMA_K:
        raise ConfigError(
            f"experts_mma needs rows of a multiple of {MMA_K} values, got {sizes['width']}",
            param="width",
        )
    return Launch((ceil_div(sizes["outputs"], 8 * options["VX_ROWS"]), sizes["tiles"], 1), 256)


def _gemv(sizes: Sizes, options: Options) -> Launch:
    return Launch((ceil_div(sizes["outputs"], 4), sizes["tiles"], 1), 128)


def _like(kernel: Kernel) -> Callable[[Sizes, Options], Launch]:
    """The launch rule of a product with one matrix, but for the tiles of tokens."""

    def rule(sizes: Sizes, options: Options) -> Launch:
        shape = {"tokens": 1, "splits": 1, "outputs": sizes["outputs"], "width": sizes["width"]}
        launch = kernel.rule(shape, options)
        return replace(launch, grid=(launch.grid[0], sizes["tiles"], 1))

    return rule


def _w4(sizes: Sizes, options: Options) -> Launch:
    multiple_of("outputs", sizes["outputs"], TILE_ROWS)
    return _like(W4_LINEAR)(sizes, options)


_PRODUCT = arguments(
    "in elem* x, in elem* w, in f32* bias?, in i32* order?, in i32* tiles, out out* y, i32 share,"
    " i32 n, i32 k"
)
ROUTE = Kernel(
    entry="route",
    source="route.cu",
    options={"VX_DTYPE": tuple(DTYPES.values()), "VX_SCORE": tuple(SCORES.values())},
    arguments=arguments(
        "in elem* logits, in f32* bias?, in f32* factor?, out i32* ids, out f32* weights,"
        " i32 tokens, i32 experts, i32 chosen, i32 groups, i32 kept, i32 best_two,"
        " i32 renormalise, f32 eps, f32 scale"
    ),
    sizes=("tokens", "experts", "groups"),
    rule=_route,
)
EXPERTS_ORDER = Kernel(
    entry="experts_order",
    source="experts.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "in i32* ids, out i32* order, out i32* place, out i32* tiles, i32 slots, i32 num_tiles,"
        " i32 width, i32 first, i32 experts"
    ),
    sizes=("experts",),
    rule=_order,
)
EXPERTS_SUM = Kernel(
    entry="experts_sum",
    source="experts.cu",
    options=ROW_OPTIONS,
    arguments=arguments(
        "in f32* out, in i32* place, in f32* weights, out elem* y, i32 width, i32 chosen"
    ),
    sizes=("rows", "width"),
    rule=by_rows,
)
CLAMPED_SWIGLU = Kernel(
    entry="clamped_swiglu",
    source="experts.cu",
    options=ROW_OPTIONS,
    arguments=arguments("in elem* gate_up, out elem* y, i32 width, f32 alpha, f32 limit"),
    sizes=("rows", "width"),
    rule=by_rows,
)
EXPERTS_GEMV = Kernel(
    entry="experts_gemv",
    source=LINEAR_GEMV.source,
    options=LINEAR_GEMV.options,
    arguments=_PRODUCT,
    sizes=("outputs", "tiles"),
    rule=_gemv,
)
EXPERTS_MMA = Kernel(
    entry="experts_mma",
    source=LINEAR_MMA.source,
    options=LINEAR_MMA.options,
    arguments=_PRODUCT,
    sizes=("outputs", "width", "tiles"),
    rule=_mma,
    tensor_cores=True,
)

EXPERTS_W4 = Kernel(
    entry="experts_w4",
    source=W4_LINEAR.source,
    options={
        **W4_LINEAR.options,
        "VX_BITS": (4, 8),
        "VX_ZERO": (ZERO_MIDDLE, ZERO_CODES),
        "VX_FOLDS": (1, 2),
        "VX_TILES": CODED_TILES,
    },
    arguments=arguments(
        "in elem* x, in u8* data, in f32* bias?, in i32* order?, in i32* tiles, out out* y,"
        " i32 share, i32 n, i32 k, i32 group_shift"
    ),
    sizes=EXPERTS_MMA.sizes,
    rule=_w4,
    tensor_cores=True,
)
EXPERTS_CODES8 = Kernel(
    entry="experts_codes8",
    source=CODES8_MMA.source,
    options={**CODES8_MMA.options, "VX_TILES": CODED_TILES},
    arguments=arguments(
        "in elem* x, in u8* w, in f32* scales, in f32* bias?, in i32* order?, in i32* tiles,"
        " out out* y, i32 share, i32 n, i32 k, i32 block_rows, i32 group_shift"
    ),
    sizes=EXPERTS_MMA.sizes,
    rule=_like(CODES8_MMA),
    tensor_cores=True,
)

KERNELS = (
    ROUTE,
    EXPERTS_ORDER,
    EXPERTS_SUM,
    CLAMPED_SWIGLU,
    EXPERTS_GEMV,
    EXPERTS_MMA,
    EXPERTS_W4,
    EXPERTS_CODES8,
)
