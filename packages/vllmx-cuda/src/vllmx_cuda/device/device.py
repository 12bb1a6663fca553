"""The face of a device: memory, copies, launches, products, events, captured graphs.

Two things have it: `vllmx_cuda.device.cupy_device` is a GPU; `vllmx_testing.cuda.emulated_device`
runs the same kernels on the CPU, for tests. All that is enqueued runs in order on one stream.
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
    """What plans are made from."""

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
        """Blocks the host until the stream has come here."""
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
        """Makes it the device of this thread; whoever enqueues from another thread than the one
        that opened it calls this first."""
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
        """Gives page-locked memory that nobody holds any more back to the system."""
        ...

    def upload(self, target: Memory, source: Bytes) -> None:
        """Enqueues a copy of `source`, which must be pinned and stay as it is until it has run."""
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
        """Whether `multiply` has a way to compute it: not every GPU and library multiplies codes
        of every size."""
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
        """Whether `enqueue`, which launches and multiplies, would do so with something whose
        algorithm `tuning` would choose by measuring. Enqueues nothing."""
        ...

    def tuning(self) -> AbstractContextManager[None]:
        """A context in which products that were not seen before choose their algorithm by
        measuring."""
        ...

    def event(self) -> Event:
        """Marks where the stream is now."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Records what `enqueue` enqueues, without running it. Everything in it must have run once
        before."""
        ...

    def join(self, communicator: Communicator, ties: Ties) -> DeviceRanks:
        """This device's end among those of all ranks, which call this at once; the device closes
        it. From then on whatever waits for the device raises RankLostError where a rank is gone.
        Raises BackendUnavailableError where something is missing for it."""
        ...

    def synchronize(self) -> None:
        """Waits for all that was enqueued."""
        ...

    def faults(self) -> AbstractContextManager[None]:
        """A context in which what the device refuses is raised as CapacityError where memory ran
        out, and as EngineDeadError where nothing can run on it any more; anything else stays as it
        is."""
        ...

    def close(self) -> None:
        """Gives pooled memory back; all `Memory` must be gone. Raises nothing for a device that is
        beyond use."""
        ...
