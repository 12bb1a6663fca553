"""How long something has stood still, for those who look at it several times a second."""

from __future__ import annotations

import time


class Looks:
    """The time between looks, one of which is taken every `interval_s`. No more than twice that
    counts, as a machine that stood still tells nothing of what is looked at."""

    def __init__(self, interval_s: float) -> None:
        self._most_s = 2 * interval_s
        self._last_s = time.monotonic()

    def passed_s(self) -> float:
        """Takes a look: the seconds that count since the last one."""
        now_s = time.monotonic()
        passed_s, self._last_s = min(now_s - self._last_s, self._most_s), now_s
        return passed_s


class Stillness:
    """The time for which a count that begins at 0 stands still."""

    def __init__(self) -> None:
        self._seen, self._still_s = 0, 0.0

    def look(self, count: int, passed_s: float, *, moves: bool = False) -> float:
        """The seconds until now, `passed_s` after the last look. `moves`: something else shows that
        it goes on."""
        is_still = count == self._seen and not moves
        self._still_s = self._still_s + passed_s if is_still else 0.0
        self._seen = count
        return self._still_s
