"""Every PTX wrapper once, for comparison of the emulator's twins with a GPU."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    HALF_DTYPES,
    Launch,
    Options,
    Sizes,
    kernel,
)


def _one_warp(sizes: Sizes, options: Options) -> Launch:
    return Launch((1, 1, 1), 32)


def _one_warpgroup(sizes: Sizes, options: Options) -> Launch:
    return Launch((1, 1, 1), 128, (64 + 128) * 128 * 2)


KERNELS = (
    kernel(
        "wrappers.cu",
        "wrappers(in elem* a, in elem* b, in u32* words, out f32* products, out u32* fused,"
        " out f32* coded, out u32* permuted, out u32* fragments, out u32* copied, out u32* loaded,"
        " out i32* dots)",
        "",
        _one_warp,
        {"VX_DTYPE": HALF_DTYPES},
        tensor_cores=True,
    ),
    kernel(
        "wgmma_wrappers.cu",
        "wgmma_wrappers(in elem* a, in elem* b, out f32* scores, out f32* values, out f32* powers)",
        "",
        _one_warpgroup,
        {"VX_DTYPE": HALF_DTYPES},
        tensor_cores=True,
        architectures=(90,),
    ),
)
