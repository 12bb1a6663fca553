"""Communication between the ranks of one model during a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import AnyArray
from vllmx_core.records import Record

T = TypeVar("T")
MOST_ROW_WIDTH = 1 << 20
"""The most 32-bit numbers of a row that ranks can gather (`Communicator.all_gather`) or add row by
row (`Communicator.sum_rows`)."""


def tree_sum(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Neighbours in pairs, then neighbouring sums, and so on. So ranks that have summed two, four
    or more neighbours each go on as one that has all."""
    while len(parts) > 1:
        pairs = [add(*parts[at : at + 2]) for at in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


class SharedAddresses(Record):
    """The addresses, in this process, of the memory that ranks of one host share, for native code
    that makes the calls itself. Each rank adds one to its `arrived` word when its part of a call
    lies in its buffer of that turn (turns alternate), and reads the others' when theirs are as
    far."""

    rank: int
    num_ranks: int
    abort: int
    """A 32-bit word: not zero when nobody will come any more."""
    arrived: int
    """A 32-bit word for each rank, `arrived_stride` bytes apart. Behind it are four more: how many
    sleep for it by a futex; the bytes of the rank's part of each turn, written before it arrives;
    and whether a link to another host sleeps for it, too."""
    arrived_stride: int
    buffers: int
    """Two of `buffer_bytes` for each rank, one rank's after the other's. A rank's part of call n,
    counted from 1, lies in the one of turn n modulo 2; where there are two ranks, in the other
    rank's while n modulo 4 is 2 or 3, so that each writes where it has read two calls before."""
    buffer_bytes: int
    taken: int
    """A 32-bit word for each rank, `arrived_stride` bytes apart, for stages: how many of the pieces
    that the rank before sent it has taken. Behind it is one more: how many sleep for it. A rank
    counts what it sends in its `arrived` word and puts piece n into its buffer of turn n modulo 2,
    when piece n - 2 was taken."""
    stages: SharedAddresses | None = None
    """The same of the ranks that have this one's place in the stages of the model, where stages
    have ranks of their own; pieces go between these."""

    @property
    def place(self) -> int:
        """Number of the process among the ranks of all stages."""
        return self.rank if self.stages is None else self.stages.rank * self.num_ranks + self.rank


class Communicator(Protocol):
    """One rank's end. Ranks that compute layers together make the same calls of `all_reduce` and
    `all_gather` in the same order; each call waits for the others. Ranks that are stages of a model
    `recv` what the rank before them `send`s; where stages have several ranks each, `rank` and
    `num_ranks` are of a stage. Raises RankLostError where one of them will not come."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: AnyArray) -> AnyArray:
        """The sum of every rank's x as `tree_sum` adds it, so that all have the same bits."""
        ...

    def sum_rows(self, x: AnyArray, held: npt.NDArray[np.bool_]) -> AnyArray:
        """The sum of every rank's x (N, E), where row n of rank r counts if `held` (N, ranks) says
        so; it is the same for all ranks. Each rank adds some rows, in the order of the ranks, and
        hands the sums to the others: much less is read than by `all_reduce` where ranks are many
        and few hold a row."""
        ...

    def all_gather(self, x: AnyArray, widths: Sequence[int]) -> AnyArray:
        """Every rank's x (N, widths[rank]) side by side, in the order of the ranks."""
        ...

    def send(self, x: AnyArray) -> None:
        """Hands x to the next rank, that of the next stage; it is read by the time this returns.
        Waits while that one has not taken what was sent before."""
        ...

    def recv(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """The next array that the rank before sent, which had this shape and dtype."""
        ...

    @property
    def shared(self) -> SharedAddresses | None:
        """The memory that the ranks share; None: the calls above are the only way."""
        ...


def place_of(communicator: Communicator) -> int:
    """The number of a rank among all of the model, whatever stage it belongs to."""
    shared = communicator.shared
    return communicator.rank if shared is None else shared.place
