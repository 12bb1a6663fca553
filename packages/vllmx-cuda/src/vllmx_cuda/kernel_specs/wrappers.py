"""Every PTX wrapper once, for comparison of the emulator's twins with a GPU."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import Kernel, Launch, Options, Sizes, arguments


def _one_warp(sizes: Sizes, options: Options) -> Launch:
    return Launch((1, 1, 1), 32)


WRAPPERS = Kernel(
    entry="wrappers",
    source="wrappers.cu",
    options={"VX_DTYPE": (1, 2)},
    arguments=arguments(
        "in elem* a, in elem* b, in u32* words, out f32* products, out u32* fused,"
        "out u32* permuted, out u32* fragments, out u32* copied, out u32* loaded, out i32* dots"
    ),
    sizes=(),
    rule=_one_warp,
    tensor_cores=True,
)

KERNELS = (WRAPPERS,)
