"""Handlers of SIGTERM, SIGINT and SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import Protocol

logger = logging.getLogger("vllmx.server")


CLOSE_S = 2.0
"""Seconds that connections get to end once all answers are sent."""
_SAME_S = 2.0
"""Signals that come so soon after the first count as the same: timeout(1) sends one to the process
and to its group."""


class Serving(Protocol):
    """The object that signals act on."""

    async def end(self) -> None:
        """Admits nothing new and returns when what is in flight has ended, or was aborted."""
        ...

    def reload(self) -> None:
        """Reads keys and certificates again."""
        ...


class Signals:
    """SIGTERM and SIGINT: while the model loads the first ends the program, and one that comes
    later does so without cleaning up; once it serves the first drains and the second stops at once.
    SIGHUP reloads keys and certificates, unless the terminal is gone: then it acts as SIGTERM."""

    def __init__(self) -> None:
        self._serving: Serving | None = None
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._ended_s: float | None = None
        """The time of the first signal that came while the model loaded."""
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
            self._end_loading()
        elif self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(self._serving))
        else:
            self._stop.set()

    def _end_loading(self) -> None:
        """Leaves the event loop, which then cancels its tasks and cleans up. Leaving it again would
        interrupt that, and the core's process would stay."""
        now_s = time.monotonic()
        if self._ended_s is None:
            self._ended_s = now_s
            raise KeyboardInterrupt
        if now_s - self._ended_s > _SAME_S:  # a download, say, that does not end
            os._exit(128 + signal.SIGINT)  # processes of ours end with us

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
