"""The device that everything here runs on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.device import Device, Product
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import Variant
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator

REHEARSED = bool(os.environ.get("REHEARSE"))
"""Whether run.sh runs without a GPU."""
SANITIZED = bool(os.environ.get("SANITIZED"))
"""Whether it runs under compute-sanitizer."""


def opener(rehearse: bool = REHEARSED, sanitized: bool = SANITIZED) -> Callable[[], Device]:
    """What opens the GPU, or the emulator in its place."""
    if rehearse:
        return EmulatedDevice
    from vllmx_cuda.device.cupy_device import CupyDevice

    return exact_device if sanitized else CupyDevice.open


def exact_device() -> Device:
    """The GPU, with an allocation of CUDA's for each of ours."""
    import cupy
    from vllmx_cuda.device.cupy_device import CupyDevice

    device = CupyDevice.open()
    device._pool = ExactPool(cupy)
    return device


class IdleDevice(EmulatedDevice):
    """Launches and multiplies nothing, and keeps a list of the kernels that it was told to prepare:
    tells without a GPU what a model would compile."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emulator=cast(Emulator, None), **options)
        self.prepared: list[Variant] = []

    def prepare(self, variants: Sequence[Variant], *, progress: bool = False) -> None:
        self.prepared += variants

    def launch(
        self,
        variant: Variant,
        sizes: dict[str, int],
        arguments: Sequence[Memory | int | float | None],
    ) -> None:
        self.prepared.append(variant)

    def multiply(self, product: Product, *operands: Any, **more: Any) -> None: ...


class ExactPool:
    """Replaces CuPy's pool, which rounds sizes up and cuts large pieces into small ones:
    compute-sanitizer knows the bounds of CUDA's allocations alone."""

    def __init__(self, cupy: Any) -> None:
        self._cuda = cupy.cuda

    def malloc(self, num_bytes: int) -> Any:
        return self._cuda.MemoryPointer(self._cuda.Memory(num_bytes), 0)

    def free_bytes(self) -> int:
        return 0

    def free_all_blocks(self) -> None: ...


class EmulatedPlugin:
    """Provides the backend "emulated", which is vllmx-cuda without a GPU, to a registry."""

    @staticmethod
    @hookimpl
    def vllmx_backends() -> tuple[BackendSpec, ...]:
        return (BackendSpec("emulated", "devices:EmulatedBackend", "devices:can_run", priority=0),)


class EmulatedBackend(CudaBackend):
    def __init__(self) -> None:
        super().__init__(opener(True))


def can_run() -> None:
    """Raises nothing: the emulator runs everywhere."""
