"""Communication between the ranks of one model during a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import AnyArray
from vllmx_core.records import Record

T = TypeVar("T")
MOST_ROW_WIDTH = 1 << 20
"""The most 32-bit numbers of a row that ranks can gather (`Communicator.all_gather`) or add row by
row (`Communicator.sum_rows`)."""


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Sums neighbours in pairs, then neighbouring sums, and so on. So the result is the same if
    each rank first sums two, four or more neighbours of its own."""
    while len(parts) > 1:
        pairs = [add(*parts[at : at + 2]) for at in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


class SharedAddresses(Record):
    """Addresses, in this process, of the memory that the ranks of a host share, for native code
    that makes the calls itself. A rank writes its part of a call into one of its two buffers, which
    alternate, adds one to its `arrived` word, and reads the others' parts once their words have
    reached the same count."""

    rank: int
    num_ranks: int
    abort: int
    """A 32-bit word: not zero once the group has ended."""
    arrived: int
    """A 32-bit word for each rank, `arrived_stride` bytes apart, followed by four more: the number
    of futex waiters on it; the bytes of the rank's part in each buffer, written before it arrives;
    and whether a link to another host waits on it."""
    arrived_stride: int
    buffers: int
    """Two buffers of `buffer_bytes` for each rank, ordered by rank. Call n, counted from 1, uses
    buffer n modulo 2. With two ranks, each writes into the other's buffer if n modulo 4 is 2 or 3:
    it has read that memory two calls before."""
    buffer_bytes: int
    taken: int
    """A 32-bit word for each rank of a stage, `arrived_stride` bytes apart: the number of pieces
    that it has taken from the previous rank, followed by the number of waiters on the word. A rank
    counts the pieces that it sends in its `arrived` word, and writes piece n into its buffer
    n modulo 2 once piece n - 2 was taken."""
    stages: SharedAddresses | None = None
    """The same for the ranks at this one's place in each stage, which send pieces to each other, if
    stages have several ranks."""

    @property
    def place(self) -> int:
        """Number of the process among the ranks of all stages."""
        return self.rank if self.stages is None else self.stages.rank * self.num_ranks + self.rank


class Communicator(Protocol):
    """One rank's end. Ranks that compute layers together make the same calls of `all_reduce` and
    `all_gather` in the same order; each call waits for the others. A rank of a stage `recv`s what
    the previous stage `send`s. If stages have several ranks each, `rank` and `num_ranks` count
    within a stage. Raises RankLostError if another rank has ended."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: AnyArray) -> AnyArray:
        """The sum of every rank's x as `tree_sum` adds it, so that all have the same bits."""
        ...

    def sum_rows(self, x: AnyArray, held: npt.NDArray[np.bool_]) -> AnyArray:
        """The sum of every rank's x (N, E), the same on all ranks; row n of rank r counts if
        `held[n, r]`. Each rank adds some of the rows, in the order of the ranks, and sends the sums
        to the others: with many ranks and few holders of a row this reads much less than
        `all_reduce`."""
        ...

    def all_gather(self, x: AnyArray, widths: Sequence[int]) -> AnyArray:
        """Every rank's x (N, widths[rank]) side by side, in the order of the ranks."""
        ...

    def send(self, x: AnyArray) -> None:
        """Sends x to the next stage's rank; x may be overwritten afterwards. Waits until earlier
        pieces were taken."""
        ...

    def recv(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """The next array from the previous stage's rank, which has this shape and dtype."""
        ...

    @property
    def shared(self) -> SharedAddresses | None:
        """The memory that the ranks share; None: only the calls above work."""
        ...


class ArrayRanks(Protocol[T]):
    """One rank's end as ops use it: the calls of `Communicator` on arrays of some library."""

    def all_reduce(self, x: T) -> T:
        """The sum of every rank's x; x may be overwritten."""
        ...

    def all_gather(self, x: T, widths: Sequence[int]) -> T:
        """Every rank's x (N, widths[rank]) in one array, in the order of the ranks."""
        ...

    def send(self, x: T) -> None:
        """Hands x to the next rank."""
        ...

    def recv(self, shape: tuple[int, ...]) -> T:
        """The next array of the rank before."""
        ...


class RowRanks(ArrayRanks[T], Protocol):
    """`ArrayRanks` that also add single rows."""

    def sum_rows(self, x: T, held: T) -> T:
        """The sum of every rank's x (N, E), where row n of rank r counts if `held` (N, ranks) says
        so."""
        ...


class HostRanks(Generic[T]):
    """Ranks whose arrays go through the host.

    Args:
        down: reads an array as NumPy's, which may wait for the device.
        up: the reverse.
        dtype: what stages send each other.
    """

    def __init__(
        self,
        communicator: Communicator,
        down: Callable[[T], AnyArray],
        up: Callable[[AnyArray], T],
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self._communicator, self._down, self._up, self._dtype = communicator, down, up, dtype

    def all_reduce(self, x: T) -> T:
        return self._up(self._communicator.all_reduce(self._down(x)))

    def sum_rows(self, x: T, held: T) -> T:
        return self._up(self._communicator.sum_rows(self._down(x), self._down(held)))

    def all_gather(self, x: T, widths: Sequence[int]) -> T:
        return self._up(self._communicator.all_gather(self._down(x), widths))

    def send(self, x: T) -> None:
        self._communicator.send(self._down(x))

    def recv(self, shape: tuple[int, ...]) -> T:
        return self._up(self._communicator.recv(shape, self._dtype))


def place_of(communicator: Communicator) -> int:
    """The number of a rank among all of the model, whatever stage it belongs to."""
    shared = communicator.shared
    return communicator.rank if shared is None else shared.place
