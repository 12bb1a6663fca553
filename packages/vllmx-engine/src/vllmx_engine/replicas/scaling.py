"""Decides when one more replica starts or one ends (`--min-replicas`).

A replica is added once the predicted wait of a new request was long for a while, and drained once
those that would be left had nothing to do for much longer: a load takes seconds to minutes, and
each one that ends loses its cache.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from vllmx_core.errors import VllmxError

from vllmx_engine.replicas.seats import Seat

logger = logging.getLogger("vllmx.replicas")

LONG_WAIT_S = 1.0
"""A predicted wait for the first token that calls for one more replica."""
GROW_AFTER_S = 3.0
SHRINK_AFTER_S = 60.0
"""Seconds for which the reason must have held."""
DRAIN_S = 60.0
"""Seconds that requests get to end where they are; then they go on elsewhere."""


class Scaling:
    """No I/O and no clock but the `now_s` of its callers.

    Args:
        least: replicas that always run.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._crowded_s: float | None = None
        self._idle_s: float | None = None
        """The times since when both reasons hold."""

    def step(self, wait_s: float, num_running: int, num_serving: int, now_s: float) -> int:
        """Returns 1 to add a replica, -1 to drain one, else 0.

        Args:
            wait_s: predicted for a new request.
            num_running: requests at all replicas that serve.
        """
        is_crowded = wait_s >= LONG_WAIT_S
        is_idle = not is_crowded and num_running < num_serving - 1
        self._crowded_s = (self._crowded_s or now_s) if is_crowded else None
        self._idle_s = (self._idle_s or now_s) if is_idle else None
        if self._crowded_s is not None and now_s - self._crowded_s >= GROW_AFTER_S:
            self._crowded_s = None
            return 1
        if self._idle_s is not None and now_s - self._idle_s >= SHRINK_AFTER_S:
            self._idle_s = None
            return -1 if num_serving > self.least else 0
        return 0

    def change(
        self,
        seats: Sequence[Seat],
        wait_s: float,
        now_s: float,
        add: Callable[[int], Awaitable[None]],
        drain: Callable[[int, float], Awaitable[None]],
    ) -> Awaitable[None] | None:
        """Returns a replica's start or end, if one is due now.

        Args:
            add, drain: of `ReplicaFrontend`.
        """
        serving = [seat for seat in seats if seat.serves]
        num_running = sum(len(seat.flights) for seat in serving)
        step = self.step(wait_s, num_running, len(serving), now_s)
        if step > 0:
            spare = next((seat for seat in seats if seat.is_spare), None)
            return None if spare is None else _added(spare, wait_s, add)
        if step < 0:
            ends = [seat for seat in serving if seat.role != "prefill"]
            return _drained(min(reversed(ends), key=lambda seat: len(seat.flights)), drain)
        return None


async def _added(seat: Seat, wait_s: float, add: Callable[[int], Awaitable[None]]) -> None:
    logger.info("requests wait for %.1f s: replica %d is added", wait_s, seat.number)
    try:
        await add(seat.number)
    except VllmxError as error:
        logger.error("replica %d cannot be added: %s", seat.number, error.message)


async def _drained(seat: Seat, drain: Callable[[int, float], Awaitable[None]]) -> None:
    logger.info("replica %d has little to do: it is drained", seat.number)
    try:
        await drain(seat.number, DRAIN_S)
        seat.is_spare = True
    except VllmxError as error:  # others were lost meanwhile
        logger.warning("replica %d stays: %s", seat.number, error.message)
