"""The interface of a device: memory, copies, launches, products, events, captured graphs.

`vllmx_cuda.device.cupy_device` implements it for a GPU; `vllmx_testing.cuda.emulated_device` runs
the same kernels on the CPU, for tests. All work runs in order on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from vllmx_core.communicator import Communicator

from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.device.ranks import DeviceRanks, Ties
from vllmx_cuda.kernel_specs import Variant


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The properties of a device that plans depend on."""

    name: str
    arch: str
    """The architecture as `vllmx_cuda.device.arch` names it."""
    num_processors: int
    """Streaming multiprocessors."""
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """y (m, n) = x (m, k) @ w (n, k).T + bias (n,): row-major, sums in float32."""

    m: int
    n: int
    k: int
    dtype: str
    """The type of x and w: bf16, f16 or f32; f8e4m3, with sums in f32; i8, with sums in i32."""
    out_dtype: str
    """The type of y and of the bias."""
    biased: bool = False
    pitch: int = 0
    """Elements from one row of y to the next; 0: n."""
    alignment: int = 256
    """Bytes that every address is a multiple of."""
    blocks: bool = False
    """FP8 with scales in float32: for each 128 x 128 of w (ceil(n / 128), groups, which are padded
    to fours), for each 128 columns of a row of x (ceil(k / 128), m). m is a multiple of 4."""


class Event(Protocol):
    """A point in the stream."""

    def wait(self) -> None:
        """Blocks the host until the stream has reached this point."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Device time between two events that have happened."""
        ...


class Graph(Protocol):
    """A captured piece of the stream."""

    def launch(self) -> None: ...


class Device(Protocol):
    """One GPU with one stream. Not thread-safe."""

    @property
    def info(self) -> DeviceInfo: ...

    def activate(self) -> None:
        """Makes it the current device of this thread. Call it first on every thread that enqueues
        work, except the one that opened the device."""
        ...

    def free_bytes(self) -> int:
        """Memory that can still be allocated."""
        ...

    def empty(self, num_bytes: int) -> Memory:
        """Allocates memory that is at least 256-byte aligned. Raises CapacityError when it does not
        fit."""
        ...

    def zeros(self, num_bytes: int) -> Memory:
        """`empty`, and filled with zero bytes."""
        ...

    def pinned(self, num_bytes: int) -> Bytes:
        """Host memory that copies can go through without the host waiting."""
        ...

    def trim_pinned(self) -> None:
        """Returns unused page-locked memory to the system."""
        ...

    def upload(self, target: Memory, source: Bytes) -> None:
        """Enqueues a copy of `source`, which must be pinned and unchanged until the copy has
        run."""
        ...

    def upload_rows(self, target: Memory, pitch: int, source: Bytes, width: int) -> None:
        """Enqueues a copy of the rows of `width` bytes that lie densely in `source` (pinned) to
        `target`, where they begin `pitch` bytes apart."""
        ...

    def download(self, target: Bytes, source: Memory) -> None:
        """Enqueues a copy into pinned memory."""
        ...

    def copy(self, target: Memory, source: Memory) -> None:
        """Enqueues a copy on the device."""
        ...

    def prepare(self, variants: Sequence[Variant], *, progress: bool = False) -> None:
        """Compiles and loads kernels, so that no launch has to."""
        ...

    def launch(
        self,
        variant: Variant,
        sizes: dict[str, int],
        arguments: Sequence[Memory | int | float | None],
    ) -> None:
        """Enqueues a kernel; `arguments` in the order of its description."""
        ...

    def can_multiply(self, product: Product) -> bool:
        """True if `multiply` can compute it: not every GPU and library multiplies codes of every
        size."""
        ...

    def multiply(
        self,
        product: Product,
        x: Memory,
        w: Memory,
        y: Memory,
        bias: Memory | None = None,
        scales: tuple[Memory, Memory] | None = None,
    ) -> None:
        """Enqueues a product; `scales` of x and of w, where it has them. The first one of its shape
        chooses an algorithm and may wait."""
        ...

    def unmeasured(self, enqueue: Callable[[], None]) -> bool:
        """True if `enqueue` runs a product whose algorithm `tuning` would choose by measuring.
        Enqueues nothing."""
        ...

    def tuning(self) -> AbstractContextManager[None]:
        """A context in which products that were not seen before choose their algorithm by
        measurement."""
        ...

    def event(self) -> Event:
        """Marks where the stream is now."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Records what `enqueue` enqueues, without running it. Everything in it must have run once
        before."""
        ...

    def join(self, communicator: Communicator, ties: Ties) -> DeviceRanks:
        """Returns this device's end of the group of ranks, which the device closes. All ranks call
        this at the same time. From then on, waiting for the device raises RankLostError if a rank
        is gone. Raises BackendUnavailableError if a library is missing."""
        ...

    def synchronize(self) -> None:
        """Waits for all enqueued work."""
        ...

    def faults(self) -> AbstractContextManager[None]:
        """A context that turns device errors into CapacityError (out of memory) and
        EngineDeadError (the device can run nothing any more). Other errors pass unchanged."""
        ...

    def close(self) -> None:
        """Frees pooled memory; all `Memory` must be gone. Never raises, even if the device is
        lost."""
        ...
