"""The torch device of a model, and its free memory."""

from __future__ import annotations

import os

import torch
from vllmx_core.errors import ConfigError
from vllmx_core.system.memory import free_bytes as free_host_bytes

DEVICE_VARIABLE = "VLLMX_TORCH_DEVICE"
KINDS = ("cuda", "xpu", "mps", "cpu")
"""Best first."""


def device_count(kind: str) -> int:
    """The number of devices of one of `KINDS` that this torch can use."""
    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = torch.cuda if kind == "cuda" else torch.xpu
    return int(module.device_count()) if module.is_available() else 0


def available_devices() -> list[str]:
    """Names that `VLLMX_TORCH_DEVICE` may have here, best first."""
    names: list[str] = []
    for kind in KINDS:
        numbered = kind in ("cuda", "xpu")
        names += [f"{kind}:{i}" if numbered else kind for i in range(device_count(kind))]
    return names


def choose_device() -> torch.device:
    """The one that VLLMX_TORCH_DEVICE names, else the best. Raises ConfigError for a name that is
    unknown or not available here."""
    known = available_devices()
    wanted = os.environ.get(DEVICE_VARIABLE, "").strip()
    if not wanted:
        return torch.device(known[0])
    if wanted in ("cuda", "xpu"):
        wanted += ":0"
    if wanted not in known:
        raise ConfigError(
            f"{DEVICE_VARIABLE}={wanted} is not a device of this torch ({torch.__version__}):"
            f" choose {', '.join(known)}",
            param=DEVICE_VARIABLE,
        )
    return torch.device(wanted)


def ranks_have_devices() -> bool:
    """True if each rank of a model gets a device of its own: devices of the chosen kind have
    numbers. Raises as `choose_device` does."""
    return choose_device().index is not None


def device_of_rank(chosen: torch.device, rank: int) -> torch.device:
    """The device of a rank of a model on several ranks: each has a device of its own where devices
    have numbers, the chosen one's next. Raises ConfigError where there are too few."""
    if chosen.index is None:
        return chosen
    mine, count = chosen.index + rank, device_count(chosen.type)
    if mine >= count:
        raise ConfigError(
            f"rank {rank} has no device: {chosen} is followed by {count - 1 - chosen.index} more"
            f" of its kind; lower --tensor-parallel-size to {count - chosen.index}",
            param="tensor_parallel_size",
        )
    return torch.device(chosen.type, mine)


def describe(device: torch.device) -> str:
    """Writes a device for people: "cuda:0 (NVIDIA H200)", "cpu (8 threads)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "xpu":
        return f"{device} ({torch.xpu.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return str(device)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can still be taken, torch's own unused cache included."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type == "xpu":
        if hasattr(torch.xpu, "mem_get_info"):
            return int(torch.xpu.mem_get_info(device)[0])
        # older versions of torch do not tell what is taken
        return int(torch.xpu.get_device_properties(device).total_memory)
    if device.type == "mps":
        most = int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
        return min(most, free_host_bytes())  # one memory for processor and GPU
    return free_host_bytes()


def has_float64(device: torch.device) -> bool:
    """True if the device computes in float64, which the sampler's definition needs."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"
