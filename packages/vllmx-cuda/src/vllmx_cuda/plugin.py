"""Registers this distribution's plugins; see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

from importlib.util import find_spec

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec


@hookimpl
def vllmx_backends() -> tuple[BackendSpec, ...]:
    return (
        BackendSpec(
            "cuda",
            "vllmx_cuda.backend:CudaBackend",
            probe="vllmx_cuda.plugin:probe",
            priority=20,
            summary="own CUDA kernels, cuBLASLt and captured graphs on NVIDIA GPUs",
            own_devices=True,
        ),
    )


def probe() -> str | None:
    """None with a driver, a GPU that is new enough, and CuPy. Opens nothing but libcuda."""
    from vllmx_cuda.device import driver

    reason = driver.unavailable_reason()
    if reason is None and find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'vllmx[cuda13]', or 'vllmx[cuda]' for CUDA 12"
    return reason
