"""Detects ranks that make no progress, by heartbeats and by the counts of their calls."""

from __future__ import annotations

import time

from vllmx_tp.futex import is_behind
from vllmx_tp.region import Region, Word


class PollTimer:
    """Measures the time between polls, one every `interval_s`. A longer gap counts as twice that at
    most: if the whole machine paused, it says nothing about what is polled."""

    def __init__(self, interval_s: float) -> None:
        self._most_s = 2 * interval_s
        self._last_s = time.monotonic()

    def passed_s(self) -> float:
        """The seconds that count since the last poll."""
        now_s = time.monotonic()
        passed_s, self._last_s = min(now_s - self._last_s, self._most_s), now_s
        return passed_s


class StallTimer:
    """Measures for how long a counter, which begins at 0, has not changed."""

    def __init__(self) -> None:
        self._seen, self._still_s = 0, 0.0

    def look(self, count: int, passed_s: float, *, moves: bool = False) -> float:
        """The seconds without a change, `passed_s` after the last poll. `moves`: something else
        shows progress."""
        is_still = count == self._seen and not moves
        self._still_s = self._still_s + passed_s if is_still else 0.0
        self._seen = count
        return self._still_s


WAIT_S = 60.0
"""Seconds that ranks wait for one in a call. Ranks compute alike, so a rank this far behind is
stuck, for example in a disk or a driver, although the thread of its heartbeat goes on."""


class CallDeadlines:
    """Watches the ranks of each stage that reduce and gather through the region."""

    def __init__(self, region: Region) -> None:
        each = region.ranks_of_stage
        self._stages = [
            range(first, first + each) for first in range(0, region.num_ranks, each) if each > 1
        ]
        self._arrived = [region.word(rank, Word.ARRIVED) for rank in range(region.num_ranks)]
        self._behind = [StallTimer() for _ in self._arrived]

    def look(self, passed_s: float) -> str | None:
        """Polls, `passed_s` after the last poll. Describes a rank that keeps others waiting too
        long, or returns None."""
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
