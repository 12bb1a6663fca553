"""The face of one rank's end on its device.

`vllmx_cuda.device.nccl` is that of GPUs; the emulated device has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from vllmx_core.communicator import Communicator

from vllmx_cuda.device.device import Memory
from vllmx_cuda.device.peers import Peers


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
