"""Deadlines of waits between ranks: the counts of their calls tell who keeps the others waiting."""

from __future__ import annotations

from vllmx_tp.futex import is_behind
from vllmx_tp.region import Region, Word
from vllmx_tp.stillness import Stillness

WAIT_S = 60.0
"""The seconds for which ranks wait for one in a call. They compute alike, so one that is so far
behind has met what it does not come back from, such as a disk or a driver that does not answer,
although its heartbeat, which has a thread of its own, goes on."""


class Waits:
    """Looks at the ranks of each stage that add and gather through the region."""

    def __init__(self, region: Region) -> None:
        each = region.ranks_of_stage
        self._stages = [
            range(first, first + each) for first in range(0, region.num_ranks, each) if each > 1
        ]
        self._arrived = [region.word(rank, Word.ARRIVED) for rank in range(region.num_ranks)]
        self._behind = [Stillness() for _ in self._arrived]

    def look(self, passed_s: float) -> str | None:
        """Takes a look, `passed_s` after the last one. The sentence on a rank that has been waited
        for too long, None where there is none."""
        for ranks in self._stages:
            counts = [int(self._arrived[rank][0]) for rank in ranks]
            for rank, count in zip(ranks, counts, strict=True):
                is_last = any(is_behind(count, other) for other in counts)
                if self._behind[rank].look(count, passed_s, moves=not is_last) >= WAIT_S:
                    return (
                        f"rank {rank} lives, but others have waited for it for {WAIT_S:.0f} s"
                        " within a step"
                    )
        return None
