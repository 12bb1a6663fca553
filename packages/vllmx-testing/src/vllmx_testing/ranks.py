"""All ranks of a model in one process, each on a thread of its own, for tests of sharding."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Queue
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from vllmx_core.communicator import tree_sum
from vllmx_core.plan import AnyArray

A = TypeVar("A")
B = TypeVar("B")


class _Table:
    """The arrays that ranks exchange in one call."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.arrays: list[AnyArray] = [np.zeros(0)] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=timeout_s)
        self.timeout_s = timeout_s
        self.sent: list[Queue[AnyArray | None]] = [Queue() for _ in self.arrays]
        """Messages from each rank to the next one; None ends them."""


class ThreadCommunicator:
    """A `vllmx_core.communicator.Communicator` among threads. A rank that does not come within
    `timeout_s` breaks the call of all."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table, self._rank = table, rank
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        """Calls so far, with the shapes of their arrays."""

    @classmethod
    def group(cls, num_ranks: int, timeout_s: float = 120.0) -> list[ThreadCommunicator]:
        """The ends of all ranks."""
        table = _Table(num_ranks, timeout_s)
        return [cls(table, rank) for rank in range(num_ranks)]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return len(self._table.arrays)

    @property
    def shared(self) -> None:
        """Threads have no memory of their own to share."""
        return None

    def abort(self) -> None:
        """Ends the calls that wait, and all later ones."""
        self._table.barrier.abort()
        for sent in self._table.sent:
            sent.put(None)

    def send(self, x: AnyArray) -> None:
        self.calls.append(("send", x.shape))
        self._table.sent[self._rank].put(x.copy())

    def recv(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        self.calls.append(("recv", shape))
        found = self._table.sent[self._rank - 1].get(timeout=self._table.timeout_s)
        if found is None:
            raise threading.BrokenBarrierError
        assert (found.shape, found.dtype) == (shape, np.dtype(dtype))
        return found

    def all_reduce(self, x: AnyArray) -> AnyArray:
        total: AnyArray = tree_sum(self._exchange("all_reduce", x), operator.add)
        return total.copy()

    def sum_rows(self, x: AnyArray, held: npt.NDArray[np.bool_]) -> AnyArray:
        total = np.zeros_like(x)
        for array, has in zip(self._exchange("sum_rows", x), held.T, strict=True):
            total[has] += array[has]
        return total

    def all_gather(self, x: AnyArray, widths: Sequence[int]) -> AnyArray:
        arrays = self._exchange("all_gather", x)
        assert [array.shape[-1] for array in arrays] == list(widths)
        return np.concatenate(arrays, axis=-1)

    def _exchange(self, call: str, x: AnyArray) -> list[AnyArray]:
        self.calls.append((call, x.shape))
        self._table.arrays[self._rank] = x
        self._table.barrier.wait()
        arrays = [*self._table.arrays]
        self._table.barrier.wait()  # nobody puts down the next one before all have taken these
        return arrays


class RankThreads(Generic[A]):
    """One object for each rank, used by all ranks at once.

    Args:
        make: of a rank's end of the communicator; what it gives belongs to that rank's thread.
    """

    def __init__(self, num_ranks: int, make: Callable[[ThreadCommunicator], A]) -> None:
        self._ends = ThreadCommunicator.group(num_ranks)
        self._threads = [ThreadPoolExecutor(1) for _ in self._ends]
        self.ranks: list[A] = self.all([partial(make, end) for end in self._ends])

    @property
    def calls(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._ends[0].calls

    def each(self, work: Callable[[A], B]) -> list[B]:
        """`work` on every rank at once; its results in the order of the ranks. Raises what the
        first rank that failed of itself raised."""
        return self.all([partial(work, one) for one in self.ranks])

    def all(self, calls: Sequence[Callable[[], B]]) -> list[B]:
        """One call for each rank, on its thread; otherwise as `each`."""
        futures = [
            thread.submit(self._guarded, call)
            for thread, call in zip(self._threads, calls, strict=True)
        ]
        broken: list[threading.BrokenBarrierError] = []
        found = []
        for future in futures:
            try:
                found.append(future.result())
            except threading.BrokenBarrierError as error:
                broken.append(error)
            except BaseException:
                self._wait(futures)
                raise
        if broken:
            raise broken[0]
        return found

    def _guarded(self, call: Callable[[], B]) -> B:
        try:
            return call()
        except BaseException:
            self._ends[0].abort()
            raise

    @staticmethod
    def _wait(futures: Sequence[Future[B]]) -> None:
        for future in futures:
            with suppress(BaseException):
                future.result()

    def close(self) -> None:
        """Ends the threads."""
        for thread in self._threads:
            thread.shutdown()
