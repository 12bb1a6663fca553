"""How many lines of batches may be in the engine: what interactive requests leave."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_LOOK_S = 0.05
"""How soon a place that somebody else left is seen."""


class Places:
    """Places are given in the order in which they were asked for.

    Args:
        rows: sequences that the engine runs together.
        num_others: requests in flight that take none of these places.
    """

    def __init__(self, rows: Callable[[], int], num_others: Callable[[], int]) -> None:
        self._rows = rows
        self._num_others = num_others
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.num_taken = 0

    @property
    def num_allowed(self) -> int:
        """A few more than are free, so that a row that ends has a successor in the engine's queue;
        one where nothing is free, so that batches end some day."""
        free = self._rows() - self._num_others()
        return free + free // 4 + 1 if free > 0 else 1

    async def take(self) -> None:
        """Waits for a place, which `leave` gives back."""
        if not self._waiting and self.num_taken < self.num_allowed:
            self.num_taken += 1
            return
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(asked)
        self._look_again()
        try:
            await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled():
                self.leave()
            else:
                self._waiting.remove(asked)
            raise

    def leave(self) -> None:
        """Gives a place back."""
        self.num_taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and self.num_taken < self.num_allowed:
            asked = self._waiting.popleft()
            if not asked.done():
                self.num_taken += 1
                asked.set_result(None)

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._give()
        if self._waiting:
            self._look_again()
