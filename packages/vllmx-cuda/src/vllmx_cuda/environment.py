"""The CUDA section of `vllmx env`: libraries and GPUs that were found, and a remedy for each
missing one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from vllmx_core.errors import VllmxError
from vllmx_core.system.memory import format_bytes

from vllmx_cuda.compiler.cubins import kernel_cache, why_unsafe
from vllmx_cuda.compiler.libraries import MAJORS, include_folders, open_library
from vllmx_cuda.compiler.nvrtc import Nvrtc
from vllmx_cuda.device import driver
from vllmx_cuda.device.arch import architecture
from vllmx_cuda.device.memory import automatic

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def facts() -> dict[str, str]:
    """Describes driver, device and libraries by name. Never raises for a missing one."""
    found = {
        "driver": _driver,
        "device": _device,
        "cupy": _cupy,
        "nvrtc": _nvrtc,
        "cublasLt": _cublas_lt,
        "dtype of bf16 models": _dtype,
        "headers": lambda: ", ".join(include_folders(newest=_newest())),
        "compiled kernels": _cache,
    }
    return {name: _tell(ask) for name, ask in found.items()}


def _tell(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (VllmxError, driver.DriverError) as error:
        return str(error)


def _newest() -> int:
    """The major version of CUDA that the driver supports, or the newest if there is no driver."""
    try:
        return driver.query().cuda_version[0]
    except driver.DriverError:
        return MAJORS[0]


def _driver() -> str:
    version = driver.query().cuda_version
    return f"up to CUDA {version[0]}.{version[1]}"


def _device() -> str:
    device = driver.choose_device(driver.query())
    return (
        f"{device.ordinal}: {device.name}, {architecture(device.capability)},"
        f" {format_bytes(device.memory_bytes)}"
    )


def _dtype() -> str:
    return automatic("bf16", driver.choose_device(driver.query()).capability)


def _cupy() -> str:
    for name in _CUPY:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "not installed: pip install 'vllmx[cuda13]', or 'vllmx[cuda]' for CUDA 12"


def _check_with_driver(library: str, version: tuple[int, int]) -> None:
    """Does nothing without a driver: its own line reports that."""
    try:
        found = driver.query().cuda_version
    except driver.DriverError:
        return
    driver.check_major(found, library, version)


def _nvrtc() -> str:
    nvrtc = Nvrtc.open(_newest())
    _check_with_driver("NVRTC", nvrtc.version)
    return f"{nvrtc.version[0]}.{nvrtc.version[1]} ({nvrtc.path})"


def _cublas_lt() -> str:
    library, path = open_library("cublasLt", _newest())
    version = int(library.cublasLtGetVersion())
    _check_with_driver("cuBLASLt", (version // 10000, version % 10000 // 100))
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100} ({path})"


def _cache() -> str:
    folder = kernel_cache().folder
    unsafe = why_unsafe(folder)
    if unsafe is not None:
        return f"not used: {unsafe}"
    files = list(folder.glob("*.cubin")) if folder.is_dir() else []
    size = format_bytes(sum(path.stat().st_size for path in files))
    return f"{len(files)} files, {size} in {folder}"
