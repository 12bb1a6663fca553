"""The interface for communication between the devices of a model's ranks.

`vllmx_cuda.device.nccl` implements it for GPUs; the emulated device has its own.
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
from vllmx_cuda.kernel_specs.ranks import blocks_at_once, parts_at

MOST_BYTES = 512 << 10
"""Sums must be smaller than this: for larger ones NCCL transfers less over the links."""
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Ties:
    """The kinds of communication that a rank's ops need."""

    meets: bool = True
    """True if it computes layers together with other ranks (tensor parallelism)."""
    exchanges: bool = False
    """True if it sends each of those ranks different data (all-to-all)."""
    sends: bool = False
    """True if a pipeline stage follows."""
    receives: bool = False
    """True if a pipeline stage precedes it."""
    sums: int = 0
    """Width of the widest rows that are summed; 0: none."""
    item: int = 0
    """Bytes of an element of these rows."""


class DeviceRanks(Protocol):
    """One rank's end. Calls are enqueued on the device's stream and captured with the launches
    around them. Ranks that compute layers together must enqueue the same calls in the same order; a
    stage receives what the previous stage sends. Raises RankLostError if a rank is lost."""

    @property
    def rank(self) -> int:
        """The rank among those that compute layers together."""
        ...

    @property
    def peers(self) -> Peers | None:
        """The memory that all of them read, for small sums; None if unavailable."""
        ...

    def all_reduce(self, x: Memory, y: Memory, count: int, dtype: str) -> None:
        """y: the sum of the `count` elements of every rank's x, with the same bits on all ranks."""
        ...

    def all_gather(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        """y: every rank's x of counts[rank] elements, one after the other."""
        ...

    def all_to_all(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        """x: the data for each rank, counts[rank] elements one after the other. y: the data that
        each rank sent to this one."""
        ...

    def send(self, x: Memory, count: int, dtype: str) -> None:
        """Sends the `count` elements of x to the next stage."""
        ...

    def recv(self, y: Memory, count: int, dtype: str) -> None:
        """y: the next `count` elements that the previous stage sent."""
        ...

    def agree(self, *, wanted: bool) -> bool:
        """True if all ranks want it; for stages, if the first one does. Waits for their votes and
        enqueues nothing."""
        ...


def agreed(communicator: Communicator, ties: Ties, *, wanted: bool) -> bool:
    """`DeviceRanks.agree` through the host."""
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
    """The layout of a rank's shared memory: flags, and two rows of `width` elements per block."""

    width: int
    item: int
    blocks: int
    """The most rows of a sum."""

    @classmethod
    def of(cls, width: int, item: int, num_processors: int) -> Share:
        """Returns the layout for rows of this width; `num_processors` is that of the smallest
        device."""
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
    """The ranks as `one_shot.cu` sees them. Shared memory lives as long as the process, because a
    rank that closes cannot know whether others still read it."""

    own: Memory
    table: Memory  # (ranks,) u64: address of each rank's share on this one
    stop: Memory  # u32 of the host; not zero: waits have ended
    share: Share
    rank: int
    num_ranks: int
    patience: int

    def takes(self, rows: int, width: int) -> bool:
        """True if it can sum such rows of the model's dtype."""
        return width == self.share.width and 0 < rows <= self.share.blocks

    def arguments(self, item: int, patience: int | None = None) -> tuple[int, ...]:
        """The last arguments of a launch for elements of `item` bytes."""
        slot = self.share.slot_bytes // item
        ranks = self.rank, self.num_ranks
        return self.share.blocks, slot, *ranks, patience or self.patience

    def end(self) -> None:
        """Ends the waits of this rank's launches; their results are invalid."""
        self._stop[0] = 1

    @property
    def ended(self) -> bool:
        """True if waits were ended."""
        return bool(self._stop[0])

    def check(self) -> None:
        """Raises RankLostError if waits were ended."""
        if self.ended:
            raise RankLostError("another rank did not take part in a sum of this one")

    @property
    def _stop(self) -> AnyArray:
        words: AnyArray = self.stop.owner.view(np.uint32)
        return words
