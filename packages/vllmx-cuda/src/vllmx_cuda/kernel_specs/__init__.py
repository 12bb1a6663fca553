"""Every kernel of this package, described once for the device and the emulator alike."""

from __future__ import annotations

from vllmx_cuda.kernel_specs import (
    attention,
    codes8,
    experts,
    gguf,
    images,
    indexer,
    latent,
    linear,
    norms,
    ranks,
    rows,
    sampling,
    states,
    w4,
    wrappers,
)
from vllmx_cuda.kernel_specs.types import (
    DTYPES,
    ITEM_BYTES,
    Argument,
    Kernel,
    Launch,
    Variant,
    has_tensor_cores,
    vector_width,
)

_GROUPS = (
    norms,
    attention,
    rows,
    linear,
    experts,
    latent,
    indexer,
    sampling,
    states,
    images,
    ranks,
    gguf,
    w4,
    codes8,
    wrappers,
)
KERNELS: dict[str, Kernel] = {kernel.entry: kernel for group in _GROUPS for kernel in group.KERNELS}
"""The kernels by entry name."""

__all__ = [
    "DTYPES",
    "ITEM_BYTES",
    "KERNELS",
    "Argument",
    "Kernel",
    "Launch",
    "Variant",
    "has_tensor_cores",
    "vector_width",
]
