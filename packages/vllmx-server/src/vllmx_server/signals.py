"""What SIGTERM and SIGINT do to the server."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllmx_server.state import ServerState

logger = logging.getLogger("vllmx.server")


CLOSE_S = 2.0
"""What connections get to end once all answers are sent."""


class Signals:
    """SIGTERM and SIGINT: while the model loads they end the program; later the first drains and
    the second stops at once."""

    def __init__(self) -> None:
        self._state: ServerState | None = None
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        if sys.platform != "win32":
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def begin_serving(self, state: ServerState) -> asyncio.Event:
        """Returns the event that is set when the server must stop."""
        self._state = state
        return self._stop

    def _on_signal(self) -> None:
        if self._state is None:
            raise KeyboardInterrupt  # leaves the event loop, which cancels and cleans up
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(self._state))
        else:
            self._stop.set()

    async def _drain(self, state: ServerState) -> None:
        logger.info("draining: %d requests in flight", state.in_flight)
        if not await state.drain(state.config.drain_timeout_s):
            logger.warning("drain timed out: %d requests are aborted", state.in_flight)
            await state.llm.shutdown()  # they end with finish reason "abort"
            await state.drain(CLOSE_S)
        self._stop.set()
