"""The GPU device against a stand-in for CuPy: numpy memory, copies that copy, launches that tell.

Nothing here proves that CUDA likes these calls; it proves that they are made, in this order, with
these sizes.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.errors import BackendUnavailableError, CapacityError, EngineDeadError
from vllmx_cuda.compiler import libraries
from vllmx_cuda.device import cupy_device as module
from vllmx_cuda.device.cublaslt import CublasLtError
from vllmx_cuda.device.cupy_device import CupyDevice
from vllmx_cuda.device.driver import DeviceFacts, DriverFacts
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import DTYPES, KERNELS

from .cupy_fakes import (
    LIMIT,
    CUDADriverError,
    CUDARuntimeError,
    FakeDriver,
    FakeLt,
    FakeNvrtc,
    fake_cupy,
)


def contents(memory: Memory) -> bytes:
    return ctypes.string_at(memory.address, memory.num_bytes)


def test_memory_and_copies(device: CupyDevice, log: list[Any]) -> None:
    assert (device.info.arch, device.info.num_processors) == ("sm_90a", 132)
    assert log[0] == ("use", 1)
    zeros, other, pinned = device.zeros(12), device.empty(12), device.pinned(6)
    assert contents(zeros) == bytes(12)
    pinned[...] = range(1, 7)
    device.upload(zeros.at(2, 6), pinned)
    device.copy(other.at(4), zeros.at(1, 8))
    assert contents(other)[4:] == bytes([0, 1, 2, 3, 4, 5, 6, 0])
    device.upload_rows(zeros, 4, pinned, 2)
    assert contents(zeros) == bytes([1, 2, 1, 2, 3, 4, 5, 6, 5, 6, 0, 0])
    back = device.pinned(3)
    device.download(back, zeros)
    assert back.tolist() == [1, 2, 1]
    assert all(stream == 77 for name, *_, stream in filter(lambda e: e[0] == "copy", log))


def test_memory_that_does_not_fit(device: CupyDevice) -> None:
    with pytest.raises(CapacityError, match=r"Fake H200.*--memory-fraction"):
        device.empty(LIMIT)


def test_a_launch_goes_to_the_driver(device: CupyDevice, log: list[Any]) -> None:
    kernel = KERNELS["layer_norm"].variant(VX_DTYPE=DTYPES["bf16"], VX_VEC=8)
    x, weight, y = (device.empty(640) for _ in range(3))
    device.prepare([kernel, kernel])
    assert [entry[0] for entry in log if entry[0] == "load"] == ["load"]
    device.launch(kernel, {"rows": 5, "width": 64}, [x, weight, None, y, 64, 1e-5])
    assert log[-1] == ("launched", 5, (5, 1, 1), (32, 1, 1), 0, 77)
    device._driver.status = 719
    with pytest.raises(CUDADriverError, match="719"):
        device.launch(kernel, {"rows": 5, "width": 64}, [x, weight, None, y, 64, 1e-5])


@pytest.mark.parametrize("num_bytes", [48 << 10, 100_000])
def test_shared_memory_is_asked_for_once(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """From 48 KiB on, and below, as far as static shared memory takes from those."""
    kernel = KERNELS["scale"].variant(VX_DTYPE=0, VX_VEC=1)
    monkeypatch.setattr(
        type(kernel),
        "launch",
        lambda self, sizes: SimpleNamespace(grid=(1, 1, 1), block=32, shared_bytes=num_bytes),
    )
    for _ in range(2):
        memory = device.empty(4)
        device.launch(kernel, {"count": 1}, [memory, memory, 1, 2.0])
    assert [entry for entry in log if entry[0] == "attribute"] == [("attribute", 5, 8, num_bytes)]


def test_a_capture_that_fails_is_ended(device: CupyDevice, log: list[Any]) -> None:
    def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError):
        device.capture(fail)
    assert log[-2:] == ["begin capture", "end capture"]
    device.capture(lambda: log.append("work")).launch()
    expected = ["begin capture", "work", "end capture", "upload graph", "launch graph"]
    assert log[-5:] == expected


def test_pinned_memory_that_is_refused(device: CupyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> Any:
        raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(device._cupy.cuda, "alloc_pinned_memory", refuse)
    with pytest.raises(CapacityError, match=r"3\.0+ MiB of page-locked.*memlock"):
        device.pinned(3 << 20)


def test_pinned_memory_of_loading_is_given_back(device: CupyDevice, log: list[Any]) -> None:
    del log[:]
    device.trim_pinned()
    assert log == ["free pinned"]


FACTS = DriverFacts((13, 1), (DeviceFacts(0, "NVIDIA H200", (9, 0), 1 << 37),))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> Any:
    """A machine on which `CupyDevice.open` succeeds; a test takes something away."""
    cupy = fake_cupy(log)
    monkeypatch.setattr(module.driver, "query", lambda: FACTS)
    monkeypatch.setattr(module.Nvrtc, "open", lambda newest: FakeNvrtc())
    monkeypatch.setattr(module.CublasLt, "open", lambda newest: FakeLt())
    monkeypatch.setattr(module.driver, "open_libcuda", lambda: FakeDriver(log))
    monkeypatch.setattr(module, "include_folders", lambda newest: ["/nowhere"])
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def test_a_whole_machine_opens(machine: Any) -> None:
    assert CupyDevice.open().info.name == "NVIDIA H200"


def refuse_with(error: Exception) -> Any:
    def refuse(*arguments: Any) -> Any:
        raise error

    return refuse


def test_no_driver_is_a_typed_error(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = refuse_with(module.driver.DriverError("NVIDIA's driver is not installed"))
    monkeypatch.setattr(module.driver, "query", missing)
    with pytest.raises(BackendUnavailableError, match="driver is not installed"):
        CupyDevice.open()


@pytest.mark.parametrize("capability", [(7, 0), (6, 1)])
def test_an_old_gpu_is_a_typed_error(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    old = DriverFacts((12, 4), (DeviceFacts(0, "Tesla", capability, 1 << 34),))
    monkeypatch.setattr(module.driver, "query", lambda: old)
    with pytest.raises(BackendUnavailableError, match=r"7\.5 \(Turing\).*--backend cpu"):
        CupyDevice.open()


def test_an_nvrtc_newer_than_the_driver(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.driver, "query", lambda: replace(FACTS, cuda_version=(12, 6)))
    with pytest.raises(
        BackendUnavailableError, match=r"NVRTC.*CUDA 13\.0.*up to CUDA 12\.6.*vllmx\[cuda\]"
    ):
        CupyDevice.open()


@pytest.mark.parametrize("library", ["Nvrtc", "CublasLt"])
def test_a_library_that_is_missing(
    machine: Any, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """The error is that of the real `open_library` where nothing is installed."""

    def open_library(*arguments: Any) -> Any:
        stem = {"Nvrtc": "nvrtc", "CublasLt": "cublasLt"}[library]
        monkeypatch.setattr(libraries, "_candidates", lambda stem, newest: ["/nowhere/lib.so"])
        return libraries.open_library(stem)

    monkeypatch.setattr(getattr(module, library), "open", open_library)
    with pytest.raises(BackendUnavailableError, match=r"lib\w+ of CUDA.*pip install nvidia-"):
        CupyDevice.open()


def test_cupy_that_is_missing(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailableError, match=r"vllmx\[cuda13\]"):
        CupyDevice.open()


@pytest.mark.parametrize(
    ("text", "kind", "remedy"),
    [
        ("cudaErrorInsufficientDriver: ...", BackendUnavailableError, r"13\.1.*update NVIDIA"),
        ("cudaErrorMemoryAllocation: ...", CapacityError, "H200 has no memory.*VLLMX_CUDA_DEVICE"),
        ("cudaErrorDevicesUnavailable: ...", BackendUnavailableError, "another process"),
        ("cudaErrorUnknown: ...", BackendUnavailableError, "cannot open NVIDIA H200.*dmesg"),
    ],
)
def test_a_gpu_that_cuda_refuses(
    machine: Any, text: str, kind: type[Exception], remedy: str
) -> None:
    machine.cuda.runtime.getDeviceProperties = refuse_with(CUDARuntimeError(text))
    with pytest.raises(kind, match=remedy):
        CupyDevice.open()


ILLEGAL = CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("error", "lost", "kind", "says"),
    [
        (ILLEGAL, True, EngineDeadError, "Fake H200 failed.*cudaErrorIllegalAddress.*Xid"),
        (CublasLtError("cuBLASLt refuses: status 13"), True, EngineDeadError, "cudaErrorIllegal"),
        (CUDADriverError("CUDA_ERROR_LAUNCH_FAILED: ..."), True, EngineDeadError, "nvidia-smi"),
        (CUDARuntimeError("cudaErrorInvalidValue: ..."), False, CUDARuntimeError, "InvalidValue"),
        (
            CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
            False,
            CapacityError,
            "Fake H200 has no memory left.*--memory-fraction",
        ),
        (CUDARuntimeError("cudaErrorMemoryAllocation: ..."), False, CapacityError, "lower"),
        (CublasLtError("cuBLASLt refuses: status 3", 3), False, CapacityError, "lower"),
        (ValueError("a bug"), True, ValueError, "a bug"),
    ],
)
def test_a_fault_says_whether_the_gpu_can_go_on(
    device: CupyDevice, error: Exception, lost: bool, kind: type[Exception], says: str
) -> None:
    if lost:
        device._runtime.deviceSynchronize = refuse_with(ILLEGAL)
    with pytest.raises(kind, match=says) as caught, device.faults():
        raise error
    assert caught.value is error or caught.value.__cause__ is error


def test_a_gpu_that_is_lost_can_be_closed(device: CupyDevice) -> None:
    device._runtime.deviceSynchronize = refuse_with(ILLEGAL)
    device._stream.synchronize = refuse_with(ILLEGAL)
    device._pool.free_all_blocks = refuse_with(ILLEGAL)
    device.close()


def test_a_launch_of_nothing_is_none(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses a grid of 0."""
    kernel, memory = KERNELS["scale"].variant(VX_DTYPE=0, VX_VEC=1), device.empty(4)
    arguments = [memory, memory, 1, 2.0]
    shape = SimpleNamespace(grid=(1, 1, 1), block=32, shared_bytes=0)
    monkeypatch.setattr(type(kernel), "launch", lambda self, sizes: shape)
    device.launch(kernel, {"count": 1}, arguments)
    shape.grid = (3, 0, 1)
    log.clear()
    device.launch(kernel, {"count": 0}, arguments)
    assert not log


@pytest.mark.parametrize("status", [2, 35, 46, 700])
def test_texts_of_the_real_runtime(status: int) -> None:
    """The words that `open_error` and `faults` look for."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    words = {2: "MemoryAllocation", 35: "InsufficientDriver", 46: "DevicesUnavailable"}
    text = str(cupy.cuda.runtime.CUDARuntimeError(status))
    assert words.get(status, "IllegalAddress") in text


def test_a_query_of_the_real_runtime_answers_its_status() -> None:
    """Without a driver it is an error, which `eventQuery` alone does not raise."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cupy.cuda.runtime.eventQuery(0) not in (0, 600)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.runtime.memGetInfo()
