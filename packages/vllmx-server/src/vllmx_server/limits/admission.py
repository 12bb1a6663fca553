"""Counts the requests in flight of the whole server, and decides whether to admit another one."""

from __future__ import annotations

import asyncio

from vllmx_engine.text.gauge import Alone, Gauge

from vllmx_server.errors import OverloadedError


class Admission:
    """Counts generation requests from their admission to the end of their answers.

    Args:
        limit: how many may be in flight in the whole server.
        gauge: of those of other processes.

    Attributes:
        draining: nobody is let in any more.
        in_flight: in this process.
    """

    def __init__(self, limit: int, gauge: Gauge | None = None) -> None:
        self._limit = limit
        self._gauge = gauge or Alone()
        self._idle = asyncio.Event()
        self.draining = False
        self.in_flight = 0

    def check(self) -> None:
        """Raises OverloadedError while draining and over the limit."""
        if self.draining:
            raise OverloadedError("the server is shutting down: send the request to another one")
        in_flight = self.in_flight + self._gauge.elsewhere
        if in_flight >= self._limit:
            raise OverloadedError(
                f"{in_flight} requests are in flight, the limit is {self._limit}: try again later,"
                " or raise --max-concurrent-requests"
            )

    def enter(self) -> None:
        self.in_flight += 1
        self._gauge.set(self.in_flight)

    def leave(self) -> None:
        self.in_flight -= 1
        self._gauge.set(self.in_flight)
        if self.draining and not self.in_flight:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Lets nobody in and waits until every answer has been sent; False when the time was up."""
        self.draining = True
        if self.in_flight:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        return True
