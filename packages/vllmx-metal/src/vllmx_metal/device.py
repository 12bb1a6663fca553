"""The device that MLX computes on: its name, the memory that a model may take, and MLX's memory
limits."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import mlx.core as mx
from vllmx_core.system.memory import free_bytes as host_free_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device."""

    name: str
    is_gpu: bool
    working_set_bytes: int
    """Metal's recommended working set of the GPU; on the CPU the host's free memory."""
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


def keep_resident(device: Device, model_bytes: int, step_bytes: int) -> None:
    """Tells a GPU's MLX to keep a model (weights and KV pages) with what a step needs where the GPU
    reaches it, instead of having it paged out between requests, and to keep no more than a step's
    buffers for the next one."""
    if device.is_gpu:
        mx.set_wired_limit(min(device.working_set_bytes, model_bytes + step_bytes))
        mx.set_cache_limit(step_bytes)


def release(device: Device) -> None:
    """Nothing has to stay resident any more."""
    if device.is_gpu:
        mx.set_wired_limit(0)
