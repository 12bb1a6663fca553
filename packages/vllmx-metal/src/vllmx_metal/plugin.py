"""Registers what this distribution brings; see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec


@hookimpl
def vllmx_backends() -> tuple[BackendSpec, ...]:
    return (
        BackendSpec(
            "metal",
            "vllmx_metal.backend:MetalBackend",
            probe="vllmx_metal.plugin:probe",
            # elsewhere MLX has the processor alone, which is for tests: only by name
            priority=20 if on_apple_silicon() else -1,
            summary="MLX on Apple GPUs (on Linux: MLX's CPU device, for tests)",
        ),
    )


def on_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def probe() -> str | None:
    """None where MLX is installed; it is not imported, and the GPU is judged at load."""
    if sys.platform == "darwin" and not on_apple_silicon():
        return "MLX runs on Apple silicon only, this is an Intel Mac (or a Python for one)"
    if find_spec("mlx") is None:
        return "MLX is not installed: pip install 'vllmx[metal]'"
    return None
