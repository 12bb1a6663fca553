"""Registers what this distribution brings; see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec, EncoderSpec


@hookimpl
def vllmx_backends() -> tuple[BackendSpec, ...]:
    return (
        BackendSpec(
            "cpu",
            "vllmx_cpu.backend:CpuBackend",
            probe="vllmx_cpu.plugin:probe",
            priority=10,
            summary="numpy and native C++ kernels on x86-64 and 64-bit ARM",
            fixed_sums=True,
        ),
    )


@hookimpl
def vllmx_encoders() -> tuple[EncoderSpec, ...]:
    return (EncoderSpec("cpu", "vllmx_cpu.encoder:NativeEncoder"),)


def probe() -> str | None:
    """None when the kernels are built, or can be built at first use."""
    from vllmx_cpu import build

    if build.LIBRARY.exists():
        return None
    try:
        build.find_toolchain()
    except build.BuildError as error:
        return f"its kernels are not built and {error}"
    return None
