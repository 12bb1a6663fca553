"""The face of one rank's end on its device.

`vllmx_cuda.device.nccl` is that of GPUs; the emulated device has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from vllmx_core.communicator import Communicator
from vllmx_core.errors import RankLostError
from vllmx_core.plan import AnyArray

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import vector_width
from vllmx_cuda.kernel_specs.one_shot import blocks_at_once, parts_at

MOST_BYTES = 512 << 10
"""What a sum must stay below: of more, NCCL reads less over the links."""
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Ties:
    """What a model on several devices has to do with those of the others."""

    meets: bool = True
    """Whether it computes layers together with other ranks."""
    exchanges: bool = False
    """Whether it sends each of those something of its own."""
    sends: bool = False
    """Whether a stage comes behind it."""
    receives: bool = False
    """Whether a stage is before it."""
    sums: int = 0
    """The width of the widest rows that are summed; 0: none are."""
    item: int = 0
    """Bytes of an element of those."""


class DeviceRanks(Protocol):
    """Calls are enqueued on the device's stream, and captured with what stands around them. Ranks
    that meet enqueue the same ones in the same order, and a stage receives what the one before it
    sends. Raises RankLostError where one will not come."""

    @property
    def rank(self) -> int:
        """Which one this is of those that meet."""
        ...

    @property
    def peers(self) -> Peers | None:
        """The memory that all of them read, for small sums; None: there is none."""
        ...

    def all_reduce(self, x: Memory, y: Memory, count: int, dtype: str) -> None:
        """y: the sum of the `count` elements of every rank's x, with the same bits on all ranks."""
        ...

    def all_gather(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        """y: every rank's x of counts[rank] elements, one behind the other."""
        ...

    def all_to_all(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        """x: what each rank is sent, counts[rank] elements one behind the other. y: what each rank
        sent to this one."""
        ...

    def send(self, x: Memory, count: int, dtype: str) -> None:
        """The `count` elements of x, to the next stage."""
        ...

    def recv(self, y: Memory, count: int, dtype: str) -> None:
        """y: what the stage before sent next, which were as many."""
        ...

    def agree(self, *, wanted: bool) -> bool:
        """Whether every rank wants it, after all have said so; of stages, whether the first one
        does. Enqueues nothing."""
        ...


def agreed(communicator: Communicator, ties: Ties, *, wanted: bool) -> bool:
    """See `DeviceRanks.agree`: through the host."""
    if ties.meets:
        votes = communicator.all_reduce(np.array([float(wanted)], np.float32))
        wanted = bool(votes[0] == communicator.num_ranks)
    if ties.receives:
        wanted = bool(communicator.recv((1,), np.float32)[0])
    if ties.sends:
        communicator.send(np.array([float(wanted)], np.float32))
    return wanted


@dataclass(frozen=True, slots=True)
class Share:
    """What each rank shares: words, and two rows of `width` elements for each block."""

    width: int
    item: int
    blocks: int
    """The most rows of a sum."""

    @classmethod
    def of(cls, width: int, item: int, num_processors: int) -> Share:
        """The one for rows of this width; `num_processors` are those of the smallest device."""
        at_once = blocks_at_once(width, vector_width(width), num_processors)
        return cls(width, item, min(at_once, (MOST_BYTES - 1) // (width * item)))

    @property
    def slot_bytes(self) -> int:
        """Bytes from one row to the next."""
        return -(-self.width * self.item // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return parts_at(self.blocks) + 2 * self.blocks * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks as `one_shot.cu` knows them. What this one shares lives as long as the process: who
    closes first cannot know whether the others still read."""

    own: Memory
    table: Memory  # (ranks,) u64: where each rank's share lies for this one
    stop: Memory  # u32 of the host; not zero: nobody waits any more
    share: Share
    rank: int
    num_ranks: int
    patience: int

    def takes(self, rows: int, width: int) -> bool:
        """Whether a sum of rows of the model's dtype may be made here."""
        return width == self.share.width and 0 < rows <= self.share.blocks

    def arguments(self, item: int, patience: int | None = None) -> tuple[int, ...]:
        """The last arguments of a launch, in which an element has so many bytes."""
        slot = self.share.slot_bytes // item
        ranks = self.rank, self.num_ranks
        return self.share.blocks, slot, *ranks, patience or self.patience

    def end(self) -> None:
        """Ends the waits of this rank's launches, whose results are worth nothing."""
        self._stop[0] = 1

    @property
    def ended(self) -> bool:
        """Whether waits were ended."""
        return bool(self._stop[0])

    def check(self) -> None:
        """Raises RankLostError if waits were ended."""
        if self.ended:
            raise RankLostError("another rank did not come to a sum that this one made")

    @property
    def _stop(self) -> AnyArray:
        words: AnyArray = self.stop.owner.view(np.uint32)
        return words
