"""A device without a GPU: numpy buffers, kernels on the emulator, products and log-probabilities of
whole rows by numpy.

For tests: it runs what a GPU would run, launch by launch, some ten thousand times slower. It is
registered nowhere; `CudaBackend(open_device=EmulatedDevice)` makes a backend of it.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_core.communicator import Communicator
from vllmx_core.errors import CapacityError
from vllmx_core.system.memory import format_bytes
from vllmx_cuda.device.arch import number
from vllmx_cuda.device.device import DeviceInfo, Product
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.device.peers import open_peers
from vllmx_cuda.device.ranks import Peers, Ties, agreed
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.kernel_specs.types import shared_bytes

from vllmx_testing.cuda.emulated_products import NUMPY_TYPES, array, multiply, rounded, wide
from vllmx_testing.cuda.emulator import Emulator, empty
from vllmx_testing.cuda.emulator.peers import PeerGroup

EMULATED = 16
"""The most of a row that the kernels choose here."""

MEMORY_BYTES = 1 << 28
PATIENCE = 20_000
"""Polls before a rank gives up waiting for another; each takes milliseconds."""
_CAPTURED = ("launch", "multiply", "copy", "all_reduce", "all_gather", "all_to_all", "send", "recv")


class EmulatedEvent:
    """A place in the queue of its device."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.time_s = 0.0

    def happen(self) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        self._device.calls["wait"] += 1
        self._device.run_until(self.happen)

    def seconds_since(self, earlier: Any) -> float:
        assert self.time_s, "the event has not happened: wait for it"
        return float(self.time_s - earlier.time_s)


class EmulatedGraph:
    """The captured calls, made again at each launch."""

    def __init__(self, device: EmulatedDevice, calls: Sequence[Callable[[], None]]) -> None:
        self._device, self._captured = device, calls

    def launch(self) -> None:
        self._device.submit("graph", *self._captured)


class EmulatedDevice:
    """`vllmx_cuda.device.device.Device`.

    Args:
        check: the emulator's instrumented build, which finds races and bad accesses.
        num_processors: small, so that work is split a little and not a lot.
        arch: what it says that it is.
        deferred: as a GPU that is as late as it may be: what was enqueued runs when somebody waits
            for it, and so shows whoever reads results or writes pinned memory too early.
        peers: the ranks of this process, whose memory a rank can read; None: of none.
    """

    def __init__(
        self,
        *,
        check: bool = False,
        memory_bytes: int = MEMORY_BYTES,
        num_processors: int = 2,
        arch: str = "sm_90a",
        deferred: bool = False,
        emulator: Emulator | None = None,
        peers: PeerGroup | None = None,
    ) -> None:
        self.info = DeviceInfo("emulated GPU", arch, num_processors, memory_bytes)
        self.allocated_bytes = 0
        self.calls: Counter[str] = Counter()
        """Number of calls by method; "graph": launches of graphs."""
        self._emulator = self._meeting = emulator or Emulator(check=check)
        self._group = peers
        self._peers: Peers | None = None
        self._captured: list[Callable[[], None]] | None = None
        self._deferred = deferred
        self._queue: deque[Callable[[], None]] = deque()

    def submit(self, kind: str, *calls: Callable[[], None]) -> None:
        """Submits calls to the stream; to the graph while one is captured."""
        self.calls[kind] += 1
        if self._captured is not None:
            assert kind in _CAPTURED, f"CUDA refuses {kind} while it captures"
            self._captured += calls
        elif self._deferred:
            self._queue += calls
        else:
            for call in calls:
                call()

    def run_until(self, last: Callable[[], None] | None) -> None:
        """Runs what is in the queue, up to `last`; all of it for None."""
        if last is not None and last not in self._queue:
            return
        while self._queue:
            call = self._queue.popleft()
            call()
            if call == last:
                return

    def activate(self) -> None:
        return

    def free_bytes(self) -> int:
        return self.info.memory_bytes - self.allocated_bytes

    def empty(self, num_bytes: int) -> Memory:
        if num_bytes > self.free_bytes():
            raise CapacityError(
                f"{format_bytes(num_bytes)} of device memory were asked for, "
                f"{format_bytes(self.free_bytes())} are free: lower --max-num-seqs"
            )
        buffer = empty(max(1, num_bytes), np.uint8)  # every bit set: NaN where it is not written
        self.allocated_bytes += num_bytes
        weakref.finalize(buffer, self._freed, num_bytes)
        return Memory(buffer.ctypes.data, num_bytes, buffer)

    def _freed(self, num_bytes: int) -> None:
        self.allocated_bytes -= num_bytes

    def zeros(self, num_bytes: int) -> Memory:
        memory = self.empty(num_bytes)
        memory.owner[...] = 0
        return memory

    def pinned(self, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, np.uint8)

    def trim_pinned(self) -> None:
        """Nothing: there is no pool."""

    def upload(self, target: Memory, source: Bytes) -> None:
        def run() -> None:
            array(target, np.uint8)[: source.nbytes] = source

        self.submit("upload", run)

    def upload_rows(self, target: Memory, pitch: int, source: Bytes, width: int) -> None:
        def run() -> None:
            for index, row in enumerate(source.reshape(-1, width)):
                array(target.at(index * pitch, width), np.uint8)[...] = row

        self.submit("upload_rows", run)

    def download(self, target: Bytes, source: Memory) -> None:
        def run() -> None:
            target[...] = array(source, np.uint8)[: target.nbytes]

        self.submit("download", run)

    def copy(self, target: Memory, source: Memory) -> None:
        def run() -> None:
            array(target, np.uint8)[: source.num_bytes] = array(source, np.uint8)

        self.submit("copy", run)

    def prepare(self, variants: Sequence[Variant], *, progress: bool = False) -> None:
        """Nothing: the emulator compiles at the first launch."""

    def launch(
        self,
        variant: Variant,
        sizes: dict[str, int],
        arguments: Sequence[Memory | int | float | None],
    ) -> None:
        arch = number(self.info.arch)
        assert variant.runs_on(arch), f"{variant} needs more than sm_{arch}"
        assert self._emulator.shared_bytes(variant, sizes) <= shared_bytes(arch), variant
        passed = [
            array(value, np.uint8) if isinstance(value, Memory) else value for value in arguments
        ]
        if variant.kernel.meets:
            self.submit("launch", lambda: self._meet(variant, sizes, passed))
        elif are_whole_rows(variant, passed) and not self._emulator.check:
            self.submit("launch", lambda: write_rows(variant, sizes["rows"], passed))
        else:
            self.submit("launch", lambda: self._emulator.launch(variant, sizes, passed))

    def _meet(self, variant: Variant, sizes: dict[str, int], passed: Sequence[Any]) -> None:
        self._meeting.launch(variant, sizes, passed)
        if self._peers is not None:  # the host of a GPU looks while it waits for what is behind
            self._peers.check()

    def can_multiply(self, product: Product) -> bool:
        """True if cuBLASLt could: FP8 from sm_89 on in vectors of 16 bytes, int8 in vectors of 4,
        blocks of scales only on sm_90."""
        if product.blocks and (number(self.info.arch) != 90 or product.m % 4):
            return False
        if product.dtype == "f8e4m3" and number(self.info.arch) < 89:
            return False
        size = {"f8e4m3": 16, "i8": 4}.get(product.dtype, 1)
        return product.n % size == 0 and product.k % size == 0

    def multiply(
        self,
        product: Product,
        x: Memory,
        w: Memory,
        y: Memory,
        bias: Memory | None = None,
        scales: tuple[Memory, Memory] | None = None,
    ) -> None:
        self.submit("multiply", lambda: multiply(product, x, w, y, bias, scales))

    def unmeasured(self, enqueue: Callable[[], None]) -> bool:
        return False

    def tuning(self) -> nullcontext[None]:
        return nullcontext()

    def event(self) -> EmulatedEvent:
        event = EmulatedEvent(self)
        self.submit("event", event.happen)
        return event

    def capture(self, enqueue: Callable[[], None]) -> EmulatedGraph:
        assert self._captured is None, "one capture at a time"
        self.calls["capture"] += 1
        before = self.calls.copy()
        self._captured = []
        try:
            enqueue()
            return EmulatedGraph(self, self._captured)
        finally:
            self._captured, self.calls = None, before  # what is captured has not been asked for

    def synchronize(self) -> None:
        assert self._captured is None, "CUDA refuses to wait while it captures"
        self.calls["synchronize"] += 1
        self.run_until(None)

    def join(self, communicator: Communicator, ties: Ties) -> EmulatedRanks:
        ranks = EmulatedRanks(self, communicator, ties)
        if self._group is not None and ties.sums:
            like, place = self._emulator, (self._group, communicator.rank)
            self._meeting = Emulator(
                check=like.check, order=like.order, folder=like.folder, peers=place
            )
            reach, row = EmulatedReach(self, self._group), (ties.sums, ties.item)
            self._peers = open_peers(self, communicator, reach, *row, PATIENCE)
        ranks.peers = self._peers
        return ranks

    def faults(self) -> nullcontext[None]:
        return nullcontext()

    def close(self) -> None:
        self.run_until(None)


class EmulatedRanks:
    """`vllmx_cuda.device.ranks.DeviceRanks` through a communicator of the host, which is called
    when the queue gets there. So all ranks must make the same call, or one waits for ever."""

    def __init__(self, device: EmulatedDevice, communicator: Communicator, ties: Ties) -> None:
        self._device, self._communicator, self._ties = device, communicator, ties
        self.asked: list[str] = []
        """Calls so far, captured or not."""
        self.peers: Peers | None = None

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def all_reduce(self, x: Memory, y: Memory, count: int, dtype: str) -> None:
        def run() -> None:
            total = self._communicator.all_reduce(wide(x, dtype)[:count])
            array(y, NUMPY_TYPES[dtype])[:count] = rounded(total, dtype)

        self.asked.append(f"all_reduce {count} {dtype}")
        self._device.submit("all_reduce", run)

    def all_gather(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        def run() -> None:
            own = wide(x, dtype)[: counts[self.rank]]
            parts = self._communicator.all_gather(own.reshape(1, -1), counts)
            array(y, NUMPY_TYPES[dtype])[: sum(counts)] = rounded(parts[0], dtype)

        self.asked.append(f"all_gather {[*counts]} {dtype}")
        self._device.submit("all_gather", run)

    def all_to_all(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        def run() -> None:
            ranks, mine = len(counts), counts[self.rank]
            sent = wide(x, dtype)[: sum(counts)].reshape(1, -1)
            everything = self._communicator.all_gather(sent, [sum(counts)] * ranks)
            begin = sum(counts[: self.rank])
            parts = everything.reshape(ranks, -1)[:, begin : begin + mine]
            array(y, NUMPY_TYPES[dtype])[: ranks * mine] = rounded(parts.reshape(-1), dtype)

        self.asked.append(f"all_to_all {[*counts]} {dtype}")
        self._device.submit("all_to_all", run)

    def send(self, x: Memory, count: int, dtype: str) -> None:
        def run() -> None:
            self._communicator.send(wide(x, dtype)[:count])

        self.asked.append(f"send {count} {dtype}")
        self._device.submit("send", run)

    def recv(self, y: Memory, count: int, dtype: str) -> None:
        def run() -> None:
            found = self._communicator.recv((count,), np.float32)
            array(y, NUMPY_TYPES[dtype])[:count] = rounded(found, dtype)

        self.asked.append(f"recv {count} {dtype}")
        self._device.submit("recv", run)

    def agree(self, *, wanted: bool) -> bool:
        return agreed(self._communicator, self._ties, wanted=wanted)


class EmulatedReach:
    """`vllmx_cuda.device.peers.Reach`, within one process."""

    place = 0

    def __init__(self, device: EmulatedDevice, group: PeerGroup) -> None:
        self._device, self._group = device, group

    def check(self, place: int) -> None:
        """Nothing: all can be read."""

    def share(self, num_bytes: int) -> tuple[Memory, bytes]:
        memory = self._device.zeros(num_bytes)
        self._group.share(memory.owner)
        return memory, memory.address.to_bytes(8, "little")

    def open(self, name: bytes) -> int:
        return int.from_bytes(name[:8], "little")


def are_whole_rows(variant: Variant, arguments: Sequence[Any]) -> bool:
    """True for a launch that picks the top ids, of either kernel, and more than `EMULATED`."""
    return variant.kernel.source == "logprobs.cu" and arguments[-1] > EMULATED


def write_rows(variant: Variant, rows: int, arguments: Sequence[Any]) -> None:
    """Does the work of both kernels in the second one's launch; the first does nothing."""
    if variant.kernel.entry != "logprob_rows":
        return
    logits, wanted, ids, *_, chosen, rank, top_ids, top, vocab, _, width = arguments

    def view(span: npt.NDArray[np.uint8], dtype: npt.DTypeLike, columns: int) -> npt.NDArray[Any]:
        return span.view(dtype)[: rows * columns].reshape(rows, columns)

    values, ids = view(logits, np.float32, vocab), ids.view(np.int32)
    top_ids, top = view(top_ids, np.int32, width), view(top, np.float32, width)
    chosen, rank = view(chosen, np.float32, 1), view(rank, np.int32, 1)
    top_ids[...], top[...], chosen[...], rank[...] = -1, -np.inf, -np.inf, 0
    for row, (own, token) in enumerate(zip(values, ids[:rows], strict=True)):
        count = wanted.view(np.int32)[row]
        if token < 0 or count < 0:
            continue
        with np.errstate(invalid="ignore"):  # a row without a finite value
            below = own - own.max()
            logprobs = below - np.log(np.exp(below).sum())
        likeliest = np.argsort(-own, kind="stable")[:count]
        top_ids[row, : likeliest.size], top[row, : likeliest.size] = likeliest, logprobs[likeliest]
        chosen[row], rank[row] = logprobs[token], 1 + np.count_nonzero(own > own[token])
