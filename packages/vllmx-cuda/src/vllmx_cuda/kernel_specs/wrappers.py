"""Every PTX wrapper once, for comparison of the emulator's twins with a GPU."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import Kernel, Launch, Options, Sizes, arguments


def _one_warp(sizes: Sizes, options: Options) -> Launch:
    return Launch((1, 1, 1), 32)


def _one_warpgroup(sizes: Sizes, options: Options) -> Launch:
    return Launch((1, 1, 1), 128, (64 + 128) * 128 * 2)


WRAPPERS = Kernel(
    entry="wrappers",
    source="wrappers.cu",
    options={"VX_DTYPE": (1, 2)},
    arguments=arguments(
        "in elem* a, in elem* b, in u32* words, out f32* products, out u32* fused,"
        "out f32* coded, out u32* permuted, out u32* fragments, out u32* copied, out u32* loaded,"
        "out i32* dots"
    ),
    sizes=(),
    rule=_one_warp,
    tensor_cores=True,
)

WGMMA_WRAPPERS = Kernel(
    entry="wgmma_wrappers",
    source="wgmma_wrappers.cu",
    options={"VX_DTYPE": (1, 2)},
    arguments=arguments(
        "in elem* a, in elem* b, out f32* scores, out f32* values, out f32* powers"
    ),
    sizes=(),
    rule=_one_warpgroup,
    tensor_cores=True,
    architectures=(90,),
)

KERNELS = (WRAPPERS, WGMMA_WRAPPERS)
