"""Errors of opening a GPU, told with what would help."""

from __future__ import annotations

from vllmx_core.errors import BackendUnavailableError, CapacityError, VllmxError

from vllmx_cuda.device import driver


def refusal(error: Exception, chosen: driver.DeviceFacts, facts: driver.DriverFacts) -> VllmxError:
    """What it means that CUDA refused to open a GPU."""
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
            f" there (nvidia-smi), or choose another GPU by {driver.DEVICE_VARIABLE}"
        )
    if "DevicesUnavailable" in text or "Prohibited" in text:
        return BackendUnavailableError(
            f"{chosen.name} is taken by another process ({text}): its compute mode is exclusive or"
            f" prohibited (nvidia-smi -q -d COMPUTE); choose another by {driver.DEVICE_VARIABLE}"
        )
    return BackendUnavailableError(
        f"CUDA cannot open {chosen.name} ({text}): see nvidia-smi and dmesg, or use --backend cpu"
    )
