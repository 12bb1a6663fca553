"""The face of one rank's end on its device.

`vllmx_cuda.device.nccl` is that of GPUs; the emulated device has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllmx_cuda.device.device import Memory


class DeviceRanks(Protocol):
    """Calls are enqueued on the device's stream, and captured with what stands around them. All
    ranks enqueue the same ones in the same order. Raises RankLostError where one will not come."""

    @property
    def rank(self) -> int: ...

    def all_reduce(self, x: Memory, y: Memory, count: int, dtype: str) -> None:
        """y: the sum of the `count` elements of every rank's x, with the same bits on all ranks."""
        ...

    def all_gather(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        """y: every rank's x of counts[rank] elements, one behind the other."""
        ...

    def agree(self, *, wanted: bool) -> bool:
        """Whether every rank wants it, after all have said so. Enqueues nothing."""
        ...
