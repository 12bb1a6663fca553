"""What the ranks of one model say to each other while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllmx_core.plan import AnyArray


class Communicator(Protocol):
    """One rank's end. All ranks make the same calls in the same order; each call waits for the
    others. Raises RankLostError where one of them will not come."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: AnyArray) -> AnyArray:
        """The sum of every rank's x, added in the order of the ranks, so that all have the same
        bits."""
        ...

    def all_gather(self, x: AnyArray, widths: Sequence[int]) -> AnyArray:
        """Every rank's x (N, widths[rank]) side by side, in the order of the ranks."""
        ...
