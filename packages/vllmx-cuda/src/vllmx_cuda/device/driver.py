"""Queries NVIDIA's driver through ctypes on libcuda alone: no context is created and nothing heavy
is imported, so a probe takes milliseconds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllmx_core.errors import BackendUnavailableError, CapacityError, ConfigError, VllmxError

DEVICE_VARIABLE = "VLLMX_CUDA_DEVICE"
UNFUSED_SWITCH = "VLLMX_CUDA_UNFUSED"
"""1: every op is launched on its own and when the one before has ended, for comparison. 0 or unset:
products and attention of few tokens take in their neighbours."""
MIN_CAPABILITY = (7, 5)
"""Turing, the oldest that the kernels and CUDA 13 know."""
_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_STATUS = {
    3: "the driver is not ready: is the nvidia kernel module loaded?",
    34: "the library is CUDA's stub, not a driver: install NVIDIA's driver",
    100: "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "a GPU that CUDA_VISIBLE_DEVICES names does not exist: check nvidia-smi -L",
    802: "the GPUs are not initialised yet: is nvidia-fabricmanager running?",
    803: "driver and library do not fit together: reboot after the driver's update",
    999: "unknown error of the driver: see dmesg and nvidia-smi",
}

Library = Any
"""libcuda as `ctypes.CDLL` opens it, or what a test puts in its place."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU, by the driver's numbering."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The driver and its GPUs."""

    cuda_version: tuple[int, int]
    """Newest CUDA that the driver runs."""
    devices: tuple[DeviceFacts, ...]


class DriverError(Exception):
    """No driver, or one that refuses; the message says why and what to do."""


def open_libcuda() -> Library:
    """Raises DriverError where there is no driver."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError(
        "NVIDIA's driver is not installed (no libcuda.so.1): install it, and in a container start"
        " with --gpus all"
    )


def query(open_library: Callable[[], Library] = open_libcuda) -> DriverFacts:
    """Asks the driver. Raises DriverError."""
    library = open_library()
    _check(library.cuInit(0))
    version = ctypes.c_int()
    _check(library.cuDriverGetVersion(ctypes.byref(version)))
    count = ctypes.c_int()
    _check(library.cuDeviceGetCount(ctypes.byref(count)))
    devices = tuple(_device(library, ordinal) for ordinal in range(count.value))
    return DriverFacts((version.value // 1000, version.value % 1000 // 10), devices)


def _device(library: Library, ordinal: int) -> DeviceFacts:
    handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(library.cuDeviceGet(ctypes.byref(handle), ordinal))
    _check(library.cuDeviceGetName(name, len(name), handle))
    _check(library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle))
    capability = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        _check(library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle))
        capability.append(value.value)
    return DeviceFacts(
        ordinal, name.value.decode(errors="replace"), (capability[0], capability[1]), memory.value
    )


def _check(status: int) -> None:
    if status:
        meaning = _STATUS.get(status, "see CUDA's documentation of CUresult")
        raise DriverError(f"NVIDIA's driver answers error {status}: {meaning}")


def check_major(found: tuple[int, int], library: str, version: tuple[int, int]) -> None:
    """Raises DriverError if the library belongs to a newer major version of CUDA than the driver,
    which would reject its output. A newer minor version works."""
    if version[0] > found[0]:
        extra = "vllmx[cuda]" if found[0] == 12 else "vllmx[cpu]"
        raise DriverError(
            f"{library} is of CUDA {version[0]}.{version[1]}, the driver runs up to CUDA"
            f" {found[0]}.{found[1]}: update NVIDIA's driver, or pip install '{extra}'"
        )


def choose_device(facts: DriverFacts, rank: int = 0) -> DeviceFacts:
    """The one that VLLMX_CUDA_DEVICE numbers, else the first that the kernels run on; of a model on
    several ranks the one that is so many behind it. Raises ConfigError for a number that is not
    there, DriverError where no GPU is new enough."""
    first = _first_device(facts)
    if not rank:
        return first
    ours = [one for one in facts.devices if one.capability >= MIN_CAPABILITY]
    behind = [one for one in ours if one.ordinal >= first.ordinal]
    if rank >= len(behind):
        raise ConfigError(
            f"rank {rank} has no GPU: from number {first.ordinal} on there are {len(behind)} that"
            f" the kernels run on; lower --tensor-parallel-size to {len(behind)}",
            param="tensor_parallel_size",
        )
    return behind[rank]


def _first_device(facts: DriverFacts) -> DeviceFacts:
    wanted = os.environ.get(DEVICE_VARIABLE, "").strip()
    if wanted:
        known = [str(device.ordinal) for device in facts.devices]
        if wanted not in known:
            raise ConfigError(
                f"{DEVICE_VARIABLE}={wanted} is not a GPU of this machine: choose"
                f" {', '.join(known) or 'none, there is no GPU'}",
                param=DEVICE_VARIABLE,
            )
        return _new_enough([facts.devices[int(wanted)]])
    return _new_enough(facts.devices)


def _new_enough(devices: tuple[DeviceFacts, ...] | list[DeviceFacts]) -> DeviceFacts:
    if not devices:
        raise DriverError(_STATUS[100])
    for device in devices:
        if device.capability >= MIN_CAPABILITY:
            return device
    found = ", ".join(f"{d.name} ({d.capability[0]}.{d.capability[1]})" for d in devices)
    raise DriverError(
        f"the kernels need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Turing) or"
        f" newer, found {found}: use --backend cpu"
    )


def unavailable_reason(open_library: Callable[[], Library] = open_libcuda) -> str | None:
    """None when a GPU can be used; else one sentence that names the remedy."""
    try:
        choose_device(query(open_library))
    except (DriverError, ConfigError) as error:
        return str(error)
    return None


def open_error(error: Exception, chosen: DeviceFacts, facts: DriverFacts) -> VllmxError:
    """Returns the error for a GPU that CUDA could not open, with the remedy."""
    text = str(error)
    if "InsufficientDriver" in text:
        version = ".".join(map(str, facts.cuda_version))
        return BackendUnavailableError(
            f"CuPy needs a newer driver than this one, which runs up to CUDA {version} ({text}):"
            " update NVIDIA's driver, or pip install 'vllmx[cuda]' for CUDA 12"
        )
    if "MemoryAllocation" in text:
        return CapacityError(
            f"{chosen.name} has no memory left for a CUDA context ({text}): end what else runs"
            f" there (nvidia-smi), or choose another GPU by {DEVICE_VARIABLE}"
        )
    if "DevicesUnavailable" in text or "Prohibited" in text:
        return BackendUnavailableError(
            f"{chosen.name} is taken by another process ({text}): its compute mode is exclusive or"
            f" prohibited (nvidia-smi -q -d COMPUTE); choose another by {DEVICE_VARIABLE}"
        )
    return BackendUnavailableError(
        f"CUDA cannot open {chosen.name} ({text}): see nvidia-smi and dmesg, or use --backend cpu"
    )


def is_on(switch: str) -> bool:
    """Reads a switch. Raises ConfigError for values other than 0 and 1."""
    value = os.environ.get(switch, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{switch}={value}: set it to 1 or 0, or leave it out", param=switch)
    return value == "1"
