"""A stand-in for CuPy: numpy memory, copies that copy, launches that tell. Where CuPy itself is
installed, each use of it must be one that CuPy would take (see cupy_signatures.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllmx_cuda.kernel_specs import KERNELS

from .cupy_signatures import held

LIMIT = 1 << 26


class OutOfMemoryError(MemoryError):
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
        target: int,
        pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        kind: int,
        stream: int,
    ) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

    class Function:
        ptr = 5

    class Module:
        def load(self, cubin: bytes) -> None:
            log.append(("load", cubin))

        def get_function(self, name: str) -> Function:
            assert name in KERNELS
            return Function()

    runtime = SimpleNamespace(
        memGetInfo=lambda: (LIMIT, LIMIT),
        getDeviceProperties=lambda ordinal: {"multiProcessorCount": 132},
        memcpyAsync=move,
        memcpy2DAsync=move_rows,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        CUDARuntimeError=CUDARuntimeError,
        eventQuery=lambda event: 0,
        deviceSynchronize=lambda: log.append("device synchronize"),
        memsetAsync=lambda p, value, size, stream: ctypes.memset(p, value, size),
    )
    shares: list[np.ndarray] = []

    def malloc(size: int) -> int:
        log.append(("malloc", size))
        shares.append(np.full(size, 0xFF, np.uint8))
        return shares[-1].ctypes.data

    def clear(p: int, value: int, size: int) -> None:
        log.append(("memset", value, size))
        ctypes.memset(p, value, size)

    def handle_of(p: int) -> bytes:
        log.append("handle")
        return p.to_bytes(64, "little")

    def open_handle(handle: bytes) -> int:
        log.append(("open", len(handle)))
        return int.from_bytes(handle, "little")

    runtime.malloc, runtime.memset = malloc, clear
    runtime.ipcGetMemHandle, runtime.ipcOpenMemHandle = handle_of, open_handle
    runtime.deviceCanAccessPeer = lambda device, peer: peer != 7
    ticks, events = iter(range(10_000)), iter(range(1000, 11_000))

    def set_attribute(function: int, attribute: int, value: int) -> None:
        log.append(("attribute", function, attribute, value))

    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda ordinal: SimpleNamespace(use=lambda: log.append(("use", ordinal))),
        MemoryPool=Pool,
        Stream=lambda non_blocking: Stream(log, non_blocking),
        Event=lambda: SimpleNamespace(
            at=next(ticks),
            record=lambda stream: None,
            synchronize=lambda: log.append("wait"),
            ptr=next(events),
        ),
        get_elapsed_time=lambda begin, end: float(end.at - begin.at),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        alloc_pinned_memory=bytearray,
        function=SimpleNamespace(Module=Module),
        driver=SimpleNamespace(
            funcSetAttribute=set_attribute,
            CUDADriverError=CUDADriverError,
        ),
    )
    pinned_pool = SimpleNamespace(free_all_blocks=lambda: log.append("free pinned"))
    fake = SimpleNamespace(cuda=cuda, get_default_pinned_memory_pool=lambda: pinned_pool)
    try:
        import cupy
    except ImportError:
        return fake
    return held(fake, cupy)


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


@dataclass
class FakeDriver:
    """libcuda."""

    log: list[Any]
    status: int = 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        c = config._obj
        shape = tuple(c.grid), tuple(c.block), c.shared_bytes, c.stream
        self.log.append(("launched", function.value, *shape))
        return self.status


class FakeLt:
    version = 130100

    def close(self) -> None:
        pass
