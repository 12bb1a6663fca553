"""A deadline that many waits share: it counts from its start, not from the last byte that came."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_S = 0.25
"""The longest wait between two looks at `stopped`."""


class DeadlineError(TimeoutError):
    """The deadline passed, or nobody waits any more."""


class Deadline:
    """Begins when it is made.

    Args:
        seconds: from now on.
        stopped: whether nobody waits any more; waits ask it several times a second.
    """

    def __init__(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self.seconds = seconds
        self._end_s = time.monotonic() + seconds
        self._stopped = stopped

    def left_s(self, most_s: float = _LOOK_S) -> float:
        """The seconds that the next wait may take, `most_s` at most. Raises DeadlineError."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or self._stopped():
            raise DeadlineError(f"not done within {self.seconds:g} s")
        return min(left_s, most_s)
