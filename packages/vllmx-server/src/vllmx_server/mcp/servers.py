"""All MCP servers of this process, on a thread and a loop of their own.

What a server sends is read, checked and cut there, so that whoever answers requests meets none of
it but a short text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from vllmx_server.mcp.offered import REFUSED, OfferedTool, ToolResult, failure
from vllmx_server.mcp.server import ToolServer
from vllmx_server.mcp.settings import ServerSettings
from vllmx_server.watch.counters import Outcome, ToolCounts

T = TypeVar("T")

_CLOSE_S = 8.0
_QUIET = ("mcp", "client", "httpx2", "httpcore2")
"""Loggers of the package and of what it needs: they quote what servers say."""


class ToolServers:
    """Servers that are started, and can be called.

    Args:
        settings: of servers that are not disabled.

    Attributes:
        counts: what became of their calls.
    """

    def __init__(self, settings: Sequence[ServerSettings]) -> None:
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self.counts = ToolCounts(each.name for each in settings)
        self._servers = {each.name: ToolServer(each, self.counts) for each in settings}
        self._running: list[asyncio.Task[None]] = []
        self._thread.start()
        self._submit(self._begin()).result()

    @property
    def names(self) -> list[str]:
        """The names of all servers, whether they can be called or not."""
        return list(self._servers)

    def tools(self, server: str) -> tuple[OfferedTool, ...]:
        """The tools that a server offers now."""
        return self._servers[server].tools

    def fault(self, server: str) -> str | None:
        """Why a server cannot be called; None: it can."""
        return self._servers[server].fault

    def settled(self, server: str) -> Future[None]:
        """Done once the first attempt to reach a server has ended, which its time-outs bound."""
        return self._submit(self._settled(server))

    def call(self, tool: OfferedTool, arguments: str) -> Future[ToolResult]:
        """Returns the tool's result or error. Cancelling the future cancels the call.

        Args:
            arguments: JSON, as the model wrote it.
        """
        try:
            decoded = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            called: Future[ToolResult] = Future()
            called.set_result(failure("the arguments are not a JSON object", REFUSED))
        else:
            called = self._submit(self._servers[tool.server].call(tool.tool, decoded))
        called.add_done_callback(partial(self._count, tool, time.monotonic()))
        return called

    def _count(self, tool: OfferedTool, begun_s: float, called: Future[ToolResult]) -> None:
        outcome: Outcome = "cancelled" if called.cancelled() else called.result().outcome
        self.counts.called(tool.server, tool.tool, outcome, time.monotonic() - begun_s)

    def close(self) -> None:
        """Ends all servers."""
        if self._loop.is_closed():
            return
        ending = self._submit(self._end())
        with contextlib.suppress(TimeoutError):
            ending.result(_CLOSE_S)
        for server in self._servers.values():
            if server.transport is not None:
                server.transport.let_go()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _begin(self) -> None:
        self._running = [asyncio.ensure_future(each.run()) for each in self._servers.values()]

    async def _settled(self, server: str) -> None:
        await self._servers[server].settled.wait()

    async def _end(self) -> None:
        for server, task in zip(self._servers.values(), self._running, strict=True):
            server.stop()
            if server.fault is not None:
                task.cancel()
        if self._running:
            _, left = await asyncio.wait(self._running, timeout=_CLOSE_S / 2)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=_CLOSE_S / 4)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_CLOSE_S / 8)
