"""How many frames that cost us more than their sender a connection may bring."""

from __future__ import annotations

import time
from collections.abc import Callable


class FrameBudget:
    """A token bucket: `burst` at once, and `per_s` again each second."""

    def __init__(
        self, burst: float, per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_s, self._clock = burst, per_s, clock
        self._left, self._seen_s = burst, clock()

    def take(self, count: int) -> bool:
        """False when more was taken than there was."""
        if not count:
            return True
        now_s = self._clock()
        refill = (now_s - self._seen_s) * self._per_s
        self._left = min(self._burst, self._left + refill) - count
        self._seen_s = now_s
        return self._left >= 0

    def give(self, count: int) -> None:
        self._left = min(self._burst, self._left + count)
