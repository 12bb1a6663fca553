"""What became of calls of MCP servers' tools, counted under a bounded number of names."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Literal

import msgspec

from vllmx_server.watch.histogram import Histogram

MAX_TOOLS = 256
"""Tools that are counted by name: servers may change theirs as often as they like."""
OTHER = "other"
"""All further tools of a server."""
CALL_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Outcome = Literal["ok", "error", "failed", "timed_out", "cancelled"]
"""How a call ended. `error`: the tool says so; `failed`: no answer came of it; `cancelled`: nobody
waits for one any more."""


class ToolsCounted(msgspec.Struct, frozen=True):
    """What one process has counted, on its way to another."""

    calls: list[tuple[str, str, Outcome, int]] = []
    """Counts by server, tool and outcome."""
    seconds: list[tuple[str, list[int], float]] = []
    """Counts and sum of `CALL_S`, by server."""
    restarts: list[tuple[str, int]] = []


class ToolCounts:
    """Counted and read by any thread.

    Args:
        servers: shown from the start.
    """

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._tools: set[tuple[str, str]] = set()
        self._calls: dict[tuple[str, str, Outcome], int] = {}
        self._seconds: dict[str, Histogram] = {}
        self._restarts: dict[str, int] = {}
        for server in servers:
            self._seconds[server] = Histogram(CALL_S)
            self._restarts[server] = 0

    def called(self, server: str, tool: str, outcome: Outcome, seconds: float) -> None:
        """Counts a call that has ended."""
        with self._lock:
            self._add_calls(server, tool, outcome, 1)
            self._of_server(server).observe(seconds)

    def restarted(self, server: str) -> None:
        """Counts a further attempt to reach a server."""
        with self._lock:
            self._restarts[server] = self._restarts.get(server, 0) + 1

    def counted(self) -> ToolsCounted:
        """All that was counted so far."""
        with self._lock:
            return ToolsCounted(
                calls=[(*key, count) for key, count in self._calls.items()],
                seconds=[(k, list(v.counts), v.total) for k, v in self._seconds.items()],
                restarts=list(self._restarts.items()),
            )

    def add(self, more: ToolsCounted) -> None:
        """Counts what another process has counted."""
        with self._lock:
            for server, tool, outcome, count in more.calls:
                self._add_calls(server, tool, outcome, count)
            for server, counts, total in more.seconds:
                self._of_server(server).add(counts, total)
            for server, count in more.restarts:
                self._restarts[server] = self._restarts.get(server, 0) + count

    def _add_calls(self, server: str, tool: str, outcome: Outcome, count: int) -> None:
        if (server, tool) not in self._tools:
            if len(self._tools) < MAX_TOOLS:
                self._tools.add((server, tool))
            else:
                tool = OTHER
        key = (server, tool, outcome)
        self._calls[key] = self._calls.get(key, 0) + count

    def _of_server(self, server: str) -> Histogram:
        if server not in self._seconds:
            self._seconds[server] = Histogram(CALL_S)
        return self._seconds[server]
