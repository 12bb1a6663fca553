"""The device that MLX computes on: what it is called and how much memory a model may take."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import mlx.core as mx
from vllmx_core.memory import free_bytes as host_free_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device."""

    name: str
    is_gpu: bool
    working_set_bytes: int
    """What Metal recommends to keep in the GPU's reach; on the CPU the host's free memory."""
    free_bytes: int


def current_device() -> Device:
    """Asked anew each time: what is free changes."""
    facts = mx.device_info()
    name = str(facts.get("device_name") or platform.processor() or platform.machine())
    if not mx.metal.is_available():
        free = host_free_bytes()
        return Device(f"{name} (MLX on the CPU)", False, free, free)
    working_set = int(facts["max_recommended_working_set_size"])
    return Device(name, True, working_set, max(0, working_set - mx.get_active_memory()))
