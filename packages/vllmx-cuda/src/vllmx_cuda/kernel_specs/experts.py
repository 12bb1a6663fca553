"""Mixtures of experts: routing, the order of tokens by expert, products and weighted sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllmx_core.errors import ConfigError

from vllmx_cuda.kernel_specs.codes8 import CODES8_MMA
from vllmx_cuda.kernel_specs.linear import LINEAR_GEMV, LINEAR_MMA, MMA_K
from vllmx_cuda.kernel_specs.rows import row_kernel
from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    PLAIN,
    ROW_OPTIONS,
    Kernel,
    Launch,
    Options,
    Sizes,
    at_least,
    at_most,
    ceil_div,
    kernel,
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
_PLAIN = {name: (value,) for name, value in PLAIN.items()}


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
    """The launch rule of the product with one matrix, with tiles of tokens in its second
    dimension."""

    def rule(sizes: Sizes, options: Options) -> Launch:
        shape = {"tokens": 1, "splits": 1, "outputs": sizes["outputs"], "width": sizes["width"]}
        launch = kernel.rule(shape, options)
        return replace(launch, grid=(launch.grid[0], sizes["tiles"], 1))

    return rule


def _w4(sizes: Sizes, options: Options) -> Launch:
    multiple_of("outputs", sizes["outputs"], TILE_ROWS)
    return _like(W4_LINEAR)(sizes, options)


_PRODUCT = (
    "in elem* x, in elem* w, in f32* bias?, in i32* order?, in i32* tiles, out out* y, i32 share,"
    " i32 n, i32 k"
)

KERNELS = (
    kernel(
        "route.cu",
        "route(in elem* logits, in f32* bias?, in f32* factor?, out i32* ids, out f32* weights,"
        " i32 tokens, i32 experts, i32 chosen, i32 groups, i32 kept, i32 best_two, i32 renormalise,"
        " f32 eps, f32 scale)",
        "tokens experts groups",
        _route,
        {"VX_DTYPE": ANY_DTYPE, "VX_SCORE": tuple(SCORES.values())},
    ),
    kernel(
        "experts.cu",
        "experts_order(in i32* ids, out i32* order, out i32* place, out i32* tiles, i32 slots,"
        " i32 num_tiles, i32 width, i32 first, i32 experts)",
        "experts",
        _order,
        ROW_OPTIONS,
    ),
    row_kernel(
        "experts.cu",
        "experts_sum(in f32* out, in i32* place, in f32* weights, out elem* y, i32 width,"
        " i32 chosen)",
    ),
    row_kernel(
        "experts.cu",
        "clamped_swiglu(in elem* gate_up, out elem* y, i32 width, f32 alpha, f32 limit)",
    ),
    kernel(
        LINEAR_GEMV.source, f"experts_gemv({_PRODUCT})", "outputs tiles", _gemv, LINEAR_GEMV.options
    ),
    kernel(
        "experts_mma.cu",
        f"experts_mma({_PRODUCT})",
        "outputs width tiles",
        _mma,
        {name: LINEAR_MMA.options[name] for name in ("VX_DTYPE", "VX_TILES", "VX_ROWS", "VX_OUT")},
        tensor_cores=True,
    ),
    kernel(
        W4_LINEAR.source,
        "experts_w4(in elem* x, in u8* data, in f32* bias?, in i32* order?, in i32* tiles,"
        " out out* y, i32 share, i32 n, i32 k, i32 group_shift)",
        "outputs width tiles",
        _w4,
        {
            **W4_LINEAR.options,
            **_PLAIN,
            "VX_BITS": (4, 8),
            "VX_ZERO": (ZERO_MIDDLE, ZERO_CODES),
            "VX_FOLDS": (1, 2),
            "VX_TILES": CODED_TILES,
        },
        tensor_cores=True,
    ),
    kernel(
        CODES8_MMA.source,
        "experts_codes8(in elem* x, in u8* w, in f32* scales, in f32* bias?, in i32* order?,"
        " in i32* tiles, out out* y, i32 share, i32 n, i32 k, i32 block_rows, i32 group_shift)",
        "outputs width tiles",
        _like(CODES8_MMA),
        {**CODES8_MMA.options, **_PLAIN, "VX_TILES": CODED_TILES},
        tensor_cores=True,
    ),
)
