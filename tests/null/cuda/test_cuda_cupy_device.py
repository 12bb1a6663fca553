"""The GPU device against a stand-in for CuPy: numpy memory, copies that copy, launches that tell.

Nothing here proves that CUDA likes these calls; it proves that they are made, in this order, with
these sizes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import BackendUnavailableError, CapacityError, EngineDeadError
from vllmx_cuda import cupy_device as module
from vllmx_cuda import libraries
from vllmx_cuda.cublaslt import Addresses, Algorithm, CublasLtError
from vllmx_cuda.cupy_device import CupyDevice
from vllmx_cuda.device import Memory, Product
from vllmx_cuda.driver import DeviceFacts, DriverFacts
from vllmx_cuda.kernel_specs import DTYPES, KERNELS

LIMIT = 1 << 26


class OutOfMemoryError(Exception):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


@dataclass
class Pointer:
    buffer: np.ndarray
    ptr: int


@dataclass
class Stream:
    log: list[Any]
    non_blocking: bool = False
    ptr: int = 77

    def __enter__(self) -> None:
        self.log.append("stream")

    def __exit__(self, *error: object) -> None:
        pass

    def begin_capture(self) -> None:
        self.log.append("begin capture")

    def end_capture(self) -> Any:
        self.log.append("end capture")
        return SimpleNamespace(
            upload=lambda stream: self.log.append("upload graph"),
            launch=lambda stream: self.log.append("launch graph"),
        )

    def synchronize(self) -> None:
        self.log.append("synchronize")


class Pool:
    def __init__(self) -> None:
        self.taken = 0

    def malloc(self, size: int) -> Pointer:
        if self.taken + size > LIMIT:
            raise OutOfMemoryError
        self.taken += size
        buffer = np.full(size, 0xFF, np.uint8)
        return Pointer(buffer, buffer.ctypes.data)

    def free_bytes(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        self.taken = 0


def fake_cupy(log: list[Any]) -> Any:
    def move(target: int, source: int, size: int, kind: int, stream: int) -> None:
        log.append(("copy", size, kind, stream))
        ctypes.memmove(target, source, size)

    def move_rows(
        target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, kind: int,
        stream: int,
    ) -> None:  # fmt: skip
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

    class Function:
        ptr = 5

        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *call: Any) -> None:
            log.append((self.name, *call))

    class Module:
        def load(self, cubin: bytes) -> None:
            log.append(("load", cubin))

        def get_function(self, name: str) -> Function:
            return Function(name)

    runtime = SimpleNamespace(
        memGetInfo=lambda: (LIMIT, LIMIT),
        getDeviceProperties=lambda ordinal: {"multiProcessorCount": 132},
        memcpyAsync=move, memcpy2DAsync=move_rows, memcpyHostToDevice=1, memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3, CUDARuntimeError=CUDARuntimeError,
        deviceSynchronize=lambda: log.append("device synchronize"),
        memsetAsync=lambda p, value, size, stream: ctypes.memset(p, value, size),
    )  # fmt: skip
    ticks = iter(range(10_000))
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda ordinal: SimpleNamespace(use=lambda: log.append(("use", ordinal))),
        MemoryPool=Pool,
        Stream=lambda non_blocking: Stream(log, non_blocking),
        Event=lambda: SimpleNamespace(
            at=next(ticks), record=lambda stream: None, synchronize=lambda: log.append("wait")
        ),
        get_elapsed_time=lambda begin, end: float(end.at - begin.at),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        alloc_pinned_memory=bytearray,
        function=SimpleNamespace(Module=Module),
        driver=SimpleNamespace(
            funcSetAttribute=lambda *call: log.append(("attribute", *call)),
            CUDADriverError=CUDADriverError,
        ),
    )
    return SimpleNamespace(cuda=cuda)


@dataclass
class FakeNvrtc:
    version: tuple[int, int] = (13, 0)
    path: str = "libnvrtc.so.13"
    sources: list[str] = field(default_factory=list)

    def check_architecture(self, arch: str) -> None:
        assert arch == "sm_90a"

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        self.sources.append(name)
        return f"{name} {[o for o in options if 'VX_' in o]}".encode()


class FakeLt:
    library = SimpleNamespace(cublasLtGetVersion=lambda: 130100)

    def close(self) -> None:
        pass


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def device(log: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CupyDevice:
    monkeypatch.setenv("VLLMX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "include_folders", lambda: [str(tmp_path)])
    facts = DeviceFacts(1, "Fake H200", (9, 0), 1 << 37)
    return CupyDevice(fake_cupy(log), facts, FakeNvrtc(), FakeLt)  # type: ignore[arg-type]


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


def test_a_launch_passes_scalars_of_the_parameters_sizes(
    device: CupyDevice, log: list[Any]
) -> None:
    kernel = KERNELS["layer_norm"].variant(VX_DTYPE=DTYPES["bf16"], VX_VEC=8)
    x, weight, y = (device.empty(640) for _ in range(3))
    device.prepare([kernel, kernel])
    assert [entry[0] for entry in log if entry[0] == "load"] == ["load"]
    device.launch(kernel, {"rows": 5, "width": 64}, [x, weight, None, y, 64, 1e-5])
    name, grid, block, arguments, shared, stream = log[-1]
    assert (name, grid, block, shared, stream.ptr) == ("layer_norm", (5, 1, 1), (32, 1, 1), 0, 77)
    kinds = [np.uint64, np.uint64, np.uint64, np.uint64, np.int32, np.float32]
    assert [type(value) for value in arguments] == kinds
    assert arguments[:4] == (x.address, weight.address, 0, y.address)


def test_large_shared_memory_is_asked_for_once(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = KERNELS["scale"].variant(VX_DTYPE=0, VX_VEC=1)
    monkeypatch.setattr(
        type(kernel), "launch",
        lambda self, sizes: SimpleNamespace(grid=(1, 1, 1), block=32, shared_bytes=100_000),
    )  # fmt: skip
    for _ in range(2):
        memory = device.empty(4)
        device.launch(kernel, {"count": 1}, [memory, memory, 1, 2.0])
    assert [entry for entry in log if entry[0] == "attribute"] == [("attribute", 5, 8, 100_000)]


def test_a_capture_that_fails_is_ended(device: CupyDevice, log: list[Any]) -> None:
    def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError):
        device.capture(fail)
    assert log[-2:] == ["begin capture", "end capture"]
    device.capture(lambda: log.append("work")).launch()
    expected = ["begin capture", "work", "end capture", "upload graph", "launch graph"]
    assert log[-5:] == expected


class FakeMatmul:
    """Algorithms of different speeds; what runs is written down."""

    ran: list[bytes] = []  # noqa: RUF012

    def __init__(self, lt: Any, product: Product) -> None:
        self.product = product

    def point(self, addresses: Addresses) -> None:
        self.pointed = addresses

    def algorithms(self, most: int) -> list[Algorithm]:
        return [Algorithm(bytes([i]) * 64, 0) for i in range(3)][:most]

    def accepts(self, algorithm: Algorithm) -> bool:
        return algorithm.data[0] < 3

    def run(self, algorithm: Algorithm, *addresses: int) -> None:
        FakeMatmul.ran.append(algorithm.data[:1])

    def close(self) -> None:
        pass


def test_algorithms_are_measured_while_tuning_and_remembered(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device._algorithms, "_make", FakeMatmul)
    seconds = {b"\0": 3.0, b"\1": 1.0, b"\2": 2.0}

    def measure(call: Any) -> float:
        call()
        return seconds[FakeMatmul.ran[-1]]

    monkeypatch.setattr(device._algorithms, "_measure", measure)
    x, small, large = (
        device.empty(4),
        Product(8, 3, 2, "bf16", "f32"),
        Product(9, 3, 2, "f16", "f16"),
    )
    with device.tuning():
        device.multiply(small, x, x, x)
    assert FakeMatmul.ran == [b"\0", b"\1", b"\2", b"\1"]
    FakeMatmul.ran.clear()
    device.multiply(small, x, x, x)
    device.multiply(large, x, x, x)
    assert FakeMatmul.ran == [b"\1", b"\0"], "the favourite where nothing is measured"
    again = module.AlgorithmFile(device._algorithm_file().path)
    assert again.get(small) == Algorithm(b"\1" * 64, 0)
    assert again.get(large) is None
    again.path.unlink()
    with device.tuning():
        device.multiply(small, x, x, x)
    assert not again.path.exists(), "nothing new, nothing written"


def test_scales_of_blocks_belong_to_their_product(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the library is only asked, which looks at them."""
    made: list[FakeMatmul] = []

    def make(lt: Any, product: Product) -> FakeMatmul:
        made.append(FakeMatmul(lt, product))
        return made[-1]

    monkeypatch.setattr(device._algorithms, "_make", make)
    product = Product(8, 128, 512, "f8e4m3", "bf16", blocks=True)
    assert device.can_multiply(product)
    assert made[0].pointed.w_scale % 256 == made[0].pointed.x_scale % 256 == 0
    assert made[0].pointed.w_scale
    assert made[0].pointed.x_scale
    x, of_x, of_w = (device.empty(4) for _ in range(3))
    device.multiply(product, x, x, x, None, (of_x, of_w))
    assert made[1].pointed == Addresses(0, of_w.address, of_x.address)


def test_a_stored_algorithm_that_the_library_refuses_is_measured_again(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU of the same name, or a file that somebody has edited."""
    monkeypatch.setattr(device._algorithms, "_make", FakeMatmul)
    monkeypatch.setattr(device._algorithms, "_measure", lambda call: call() or 1.0)
    file, product, x = device._algorithms._file, Product(8, 3, 2, "bf16", "f32"), device.empty(4)
    file.put(product, Algorithm(b"\7" * 64, 0))
    FakeMatmul.ran.clear()
    with device.tuning():
        device.multiply(product, x, x, x)
    assert FakeMatmul.ran == [b"\0", b"\1", b"\2", b"\0"]
    assert module.AlgorithmFile(file.path).get(product) == Algorithm(bytes(64), 0)


class RefusingMatmul(FakeMatmul):
    """Knows no FP8; of bf16 it proposes an algorithm that it then refuses to run."""

    open_ones = 0

    def __init__(self, lt: Any, product: Product) -> None:
        super().__init__(lt, product)
        RefusingMatmul.open_ones += 1

    def algorithms(self, most: int) -> list[Algorithm]:
        if self.product.dtype == "f8e4m3":
            raise CublasLtError(f"cuBLASLt refuses {self.product}: no algorithm for it")
        return super().algorithms(most)

    def run(self, algorithm: Algorithm, *addresses: int) -> None:
        if algorithm.data[0] == 0:
            raise CublasLtError("status 15")
        super().run(algorithm, *addresses)

    def close(self) -> None:
        RefusingMatmul.open_ones -= 1


def test_products_that_are_refused(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked once for each, told once for each shape of weights."""
    monkeypatch.setattr(device._algorithms, "_make", RefusingMatmul)
    caplog.set_level("INFO", "vllmx")
    for _ in range(2):
        for m in (5, 64):
            assert not device.can_multiply(Product(m, 32, 16, "f8e4m3", "f32"))
            assert device.can_multiply(Product(m, 32, 16, "i8", "i32"))
    assert RefusingMatmul.open_ones == 0
    (line,) = caplog.messages
    assert "refuses" in line
    assert "n=32, k=16" in line


def test_an_algorithm_that_does_not_run_is_not_chosen(
    device: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device._algorithms, "_make", RefusingMatmul)
    monkeypatch.setattr(device._algorithms, "_measure", lambda call: call() or 1.0)
    product, x = Product(8, 3, 2, "bf16", "f32"), device.empty(4)
    FakeMatmul.ran.clear()
    with device.tuning():
        device.multiply(product, x, x, x)
    assert FakeMatmul.ran == [b"\1", b"\2", b"\1"]
    monkeypatch.setattr(RefusingMatmul, "algorithms", lambda self, most: [FAILS, FAILS_TOO])
    with device.tuning(), pytest.raises(CublasLtError, match="status 15"):
        device.multiply(Product(9, 3, 2, "bf16", "f32"), x, x, x)


FAILS, FAILS_TOO = Algorithm(bytes(64), 0), Algorithm(bytes(64), 1)


def test_a_damaged_file_of_choices_is_ignored(tmp_path: Path) -> None:
    path, product, data = tmp_path / "choices.json", Product(1, 1, 1, "f16", "f16"), "00" * 64
    good = module.AlgorithmFile(path)
    good.put(product, Algorithm(bytes(64), 256))
    good.save()
    text = path.read_text()
    assert module.AlgorithmFile(path).get(product) == Algorithm(bytes(64), 256)
    damaged = [text[:-1], "", "[]", '{"a": 1}', text.replace(data, "zz"), text.replace(data, "00")]
    for size in ("-1", str(1 << 40)):  # more than the workspace has would be written beyond it
        damaged.append(text.replace("256", size))
    for text in damaged:
        path.write_text(text)
        assert module.AlgorithmFile(path).get(product) is None, text
    path.write_text(json.dumps(json.loads(damaged[0] + "}")))
    path.parent.chmod(0o777)
    assert module.AlgorithmFile(path).get(product) is None, "others may write there"


def test_pinned_memory_that_is_refused(device: CupyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> Any:
        raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(device._cupy.cuda, "alloc_pinned_memory", refuse)
    with pytest.raises(CapacityError, match=r"3\.0+ MiB of page-locked.*memlock"):
        device.pinned(3 << 20)


FACTS = DriverFacts((13, 1), (DeviceFacts(0, "NVIDIA H200", (9, 0), 1 << 37),))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> Any:
    """A machine on which `CupyDevice.open` succeeds; a test takes something away."""
    cupy = fake_cupy(log)
    monkeypatch.setattr(module.driver, "query", lambda: FACTS)
    monkeypatch.setattr(module.Nvrtc, "open", FakeNvrtc)
    monkeypatch.setattr(module.CublasLt, "open", FakeLt)
    monkeypatch.setattr(module, "include_folders", lambda: ["/nowhere"])
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
    """As the real `open_library` says it where nothing is installed."""

    def open_library(*arguments: Any) -> Any:
        stem = {"Nvrtc": "nvrtc", "CublasLt": "cublasLt"}[library]
        monkeypatch.setattr(libraries, "_candidates", lambda stem: ["/nowhere/lib.so"])
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
        (CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), False, CapacityError,
         "Fake H200 has no memory left.*--memory-fraction"),
        (CUDARuntimeError("cudaErrorMemoryAllocation: ..."), False, CapacityError, "lower"),
        (ValueError("a bug"), True, ValueError, "a bug"),
    ],
)  # fmt: skip
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


def test_the_real_cupy_has_what_is_used() -> None:
    cuda = pytest.importorskip("cupy", reason="CuPy is not installed").cuda
    for name in (
        "runtime.memGetInfo", "runtime.CUDARuntimeError", "runtime.getDeviceProperties",
        "runtime.memcpyAsync",
        "runtime.memcpy2DAsync", "runtime.memsetAsync", "runtime.memcpyHostToDevice",
        "runtime.memcpyDeviceToHost", "runtime.memcpyDeviceToDevice", "Device", "MemoryPool.malloc",
        "MemoryPool.free_bytes", "MemoryPool.free_all_blocks", "Stream.begin_capture",
        "Stream.end_capture", "Event.record", "Event.synchronize", "get_elapsed_time",
        "memory.OutOfMemoryError", "runtime.deviceSynchronize", "driver.CUDADriverError",
        "alloc_pinned_memory", "function.Module.load",
        "function.Module.get_function", "driver.funcSetAttribute", "Graph.launch", "Graph.upload",
    ):  # fmt: skip
        found = cuda
        for part in name.split("."):
            found = getattr(found, part)
