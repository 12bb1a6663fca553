"""Whether the engine core's process answers at all.

It is asked a few times in the length of a `/health` probe and answers from the thread that reads
the socket, so that a long step is no silence. A step that hangs is the watchdog's business; a
process that is stopped or starved cannot watch itself, and is seen from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.75
_MISSED = 4
"""Intervals without an answer until the core counts as silent."""
_HANGS = 6
"""Intervals without an answer until a core that others wait for counts as hung."""


class Heartbeat:
    """Asks every `INTERVAL_S`. Intervals are counted instead of seconds, so that time in which this
    process itself stood still is not held against the core.

    Args:
        ask: sends a question to the core.
        on_hang: called where the core has been silent for longer than anybody should wait for it.
    """

    def __init__(self, ask: Callable[[], None], on_hang: Callable[[], None] = lambda: None) -> None:
        self._ask, self._on_hang = ask, on_hang
        self._num_missed = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def silent_s(self) -> float:
        """The seconds for which the core has not answered, when that is too long; else 0."""
        return self._num_missed * INTERVAL_S if self._num_missed >= _MISSED else 0.0

    def heard(self) -> None:
        """Something came from the core."""
        self._num_missed = 0

    def start(self) -> None:
        """Needs a running event loop."""
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Stops, whether or not it was started."""
        if self._task is not None:
            self._task.cancel()

    def beat(self) -> None:
        """One question; only the first of those without an answer is sent."""
        if not self._num_missed:
            self._ask()
        self._num_missed += 1
        if self._num_missed == _HANGS:
            self._on_hang()

    async def _run(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(INTERVAL_S)
