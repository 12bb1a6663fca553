"""How many lines of batches may be in the engine: what interactive requests leave."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_LOOK_S = 0.05
"""How soon a place that somebody else left is seen."""


class LineSlots:
    """LineSlots are given in the order in which they were asked for.

    Args:
        rows: sequences that the engine runs together.
        num_others: requests in flight that take none of these slots.
    """

    def __init__(self, rows: Callable[[], int], num_others: Callable[[], int]) -> None:
        self._rows = rows
        self._num_others = num_others
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = True
        self.num_taken = 0

    async def take(self) -> None:
        """Waits for a place, which `leave` gives back."""
        if not self._waiting and self._has_place():
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
            elif asked in self._waiting:  # `_give` may have met it before this task ran again
                self._waiting.remove(asked)
            raise

    def leave(self) -> None:
        """Gives a place back."""
        self.num_taken -= 1
        self._give()

    def _has_place(self) -> bool:
        """Whether there is a place. More are given than rows are free, so that a row that ends has
        a successor in the engine's queue, and several at a time: what begins a line is fastest
        where it has just begun another one. One is where nothing is free, so that batches end some
        day."""
        free = max(0, self._rows() - self._num_others())
        left = free + free // 2 + 1 - self.num_taken
        self._is_open = left > 0 and (self._is_open or left > free // 4)
        return self._is_open

    def _give(self) -> None:
        while self._waiting and self._has_place():
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
