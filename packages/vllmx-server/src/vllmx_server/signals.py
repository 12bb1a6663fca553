"""What SIGTERM, SIGINT and SIGHUP do to the server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Protocol

logger = logging.getLogger("vllmx.server")


CLOSE_S = 2.0
"""What connections get to end once all answers are sent."""


class Serving(Protocol):
    """What a signal reaches."""

    async def end(self) -> None:
        """Admits nothing new and returns when what is in flight has ended, or was aborted."""
        ...

    def reload(self) -> None:
        """Reads again what may change while it serves."""
        ...


class Signals:
    """SIGTERM and SIGINT: while the model loads they end the program; later the first drains and
    the second stops at once. SIGHUP has certificates read again; but where it says that the
    terminal is gone, it is a SIGTERM."""

    def __init__(self) -> None:
        self._serving: Serving | None = None
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._has_terminal = _has_terminal()
        if sys.platform != "win32":
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def begin_serving(self, serving: Serving) -> asyncio.Event:
        """Returns the event that is set when the server must stop."""
        self._serving = serving
        return self._stop

    def _on_signal(self) -> None:
        if self._serving is None:
            raise KeyboardInterrupt  # leaves the event loop, which cancels and cleans up
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(self._serving))
        else:
            self._stop.set()

    def _on_hangup(self) -> None:
        if self._serving is None or (self._has_terminal and not _has_terminal()):
            self._on_signal()
        else:
            self._serving.reload()

    async def _drain(self, serving: Serving) -> None:
        await serving.end()
        self._stop.set()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
