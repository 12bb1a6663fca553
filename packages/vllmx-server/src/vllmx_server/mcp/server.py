"""One MCP server: connected to, watched, connected to again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import excerpt

from vllmx_server import __version__
from vllmx_server.mcp.listing import ToolLists
from vllmx_server.mcp.offered import (
    TIMED_OUT,
    OfferedTool,
    ToolResult,
    failure,
    offered,
    read_result,
)
from vllmx_server.mcp.settings import ServerSettings
from vllmx_server.mcp.transports import StdioTransport, http_transport
from vllmx_server.watch.counters import ToolCounts

if TYPE_CHECKING:
    from mcp import ClientSession

logger = logging.getLogger("vllmx.mcp")

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_MAX_PAGES = 100
_MAX_LISTED = 10_000
_MAX_CALLS = 16
"""The most calls at a time; others wait, within their time-out."""
_PING_S = 5.0
_RELIST_S = 5.0
"""The seconds between two readings of a list that changes."""


class _LostError(Exception):
    """The connection is of no use any more."""


class ToolServer:
    """One server, on the loop of `ToolServers`. What it has is replaced as a whole, so that other
    threads may look.

    Args:
        counts: of all servers, where restarts are counted.

    Attributes:
        tools: there while it can be called.
        fault: why it cannot be called; None: it can.
    """

    def __init__(self, settings: ServerSettings, counts: ToolCounts) -> None:
        self.settings = settings
        self._counts = counts
        self.tools: tuple[OfferedTool, ...] = ()
        self.fault: str | None = "it is being started"
        self.settled = asyncio.Event()
        """Set once the first attempt to reach it has ended."""
        self.transport: StdioTransport | None = None
        self._session: ClientSession | None = None
        self._stopping = asyncio.Event()
        self._useless = asyncio.Event()
        self._relist = asyncio.Event()
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._lists = ToolLists()
        self._left: set[asyncio.Task[Any]] = set()
        self._checking = False
        self._num_waiting = 0
        """Calls that are waited for."""
        self._told: str | None = None
        self._up_s = 0.0

    async def run(self) -> None:
        """Keeps it connected until `stop`."""
        wait_s = FIRST_WAIT_S
        while not self._stopping.is_set():
            self._up_s = 0.0
            try:
                await self._live()
                return
            except Exception as error:
                fault = _reason(error)
            if self._up_s and time.monotonic() - self._up_s > LONGEST_WAIT_S:
                wait_s = FIRST_WAIT_S
            self._down(fault)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
                return
            self._counts.restarted(self.settings.name)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def stop(self) -> None:
        self._stopping.set()

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Returns the tool's result or error; never raises."""
        session, wait_s = self._session, self.settings.call_timeout_seconds
        if session is None:
            return failure(f"the tool's server cannot be reached: {self.fault}")
        task = asyncio.ensure_future(self._call(session, tool, arguments))
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        self._num_waiting += 1
        try:
            done, _ = await asyncio.wait((task,), timeout=wait_s)
        except asyncio.CancelledError:
            task.cancel()
            self._check(session)  # it may not heed that nobody waits any more
            raise
        finally:
            self._num_waiting -= 1
        if done:
            result = task.result()
        else:
            task.cancel()  # not waited for: it may tell the server, which may not listen
            self._check(session)
            result = failure(f"the tool did not answer within {wait_s:g} s", TIMED_OUT)
        if result.code is not None:
            name = self.settings.name
            logger.info("MCP server %s: a call of %s failed (%d)", name, tool, result.code)
        return result

    async def _call(
        self, session: ClientSession, tool: str, arguments: dict[str, Any]
    ) -> ToolResult:
        from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult
        from mcp_types import InputRequiredResult as Asks
        from pydantic import TypeAdapter

        answers: TypeAdapter[CallToolResult | Asks] = TypeAdapter(CallToolResult | Asks)
        params = CallToolRequestParams(name=tool, arguments=arguments)
        try:
            async with self._calls:
                result = await session.send_request(CallToolRequest(params=params), answers)
        except Exception as error:
            self._check(session)
            return _failed(error)
        if isinstance(result, Asks):
            return failure("the tool asks a person for more, which is not served here")
        return read_result(result, self.settings.max_result_bytes)

    # --- one connection ---------------------------------------------------------------------------
    async def _live(self) -> None:
        """Connects, and stays until the server is stopped. Raises when the connection fails."""
        async with asyncio.timeout(self.settings.start_timeout_seconds) as limit:
            async with self._connected() as session:
                await self._list(session)
                limit.reschedule(None)
                self._up(session)
                try:
                    await self._stay(session)
                finally:
                    self._session, self.tools = None, ()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[ClientSession]:
        from mcp import Client
        from mcp_types import Implementation

        self._useless.clear()
        self._relist.clear()
        settings = self.settings
        self.transport = StdioTransport(settings) if settings.command is not None else None
        self._lists = ToolLists()
        client = Client(
            self._lists.checked(self.transport or http_transport(settings)),
            cache=None,
            message_handler=self._on_message,
            client_info=Implementation(name="vllmx", version=__version__),
        )
        try:
            async with client:
                yield client.session
        except Exception as error:
            if self.transport is not None and self.transport.fault is not None:
                raise _LostError(self._why_it_ended(self.transport)) from error
            raise

    def _why_it_ended(self, transport: StdioTransport) -> str:
        """Standard error is quoted only while it cannot contain anything of a call."""
        line = "" if self._up_s else transport.last_line
        return f"{transport.fault}: {line}" if line else f"{transport.fault}"

    async def _on_message(self, message: Any) -> None:
        if getattr(message, "method", "") == "notifications/tools/list_changed":
            self._relist.set()

    async def _list(self, session: ClientSession) -> None:
        from mcp_types import PaginatedRequestParams

        page = await session.list_tools()
        tools = page.tools
        for _ in range(_MAX_PAGES):
            if page.next_cursor is None or len(tools) > _MAX_LISTED:
                break
            page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
            tools += page.tools
        self.tools, left_out = offered(self.settings, tools)
        left_out += ["its definition is wrong"] * self._lists.num_wrong
        self._lists.num_wrong = 0
        if left_out:
            logger.warning(
                "MCP server %s: %d of its tools are left out: %s%s",
                self.settings.name,
                len(left_out),
                "; ".join(left_out[:3]),
                " ..." if len(left_out) > 3 else "",
            )

    async def _stay(self, session: ClientSession) -> None:
        ended = asyncio.Event() if self.transport is None else self.transport.ended
        events = (self._stopping, self._useless, ended, self._relist)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            while True:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if self._stopping.is_set():
                    return
                if ended.is_set() or self._useless.is_set():
                    raise _LostError("it does not answer any more")
                self._relist.clear()
                waits[-1] = asyncio.ensure_future(self._relist.wait())
                async with asyncio.timeout(self.settings.start_timeout_seconds):
                    await self._list(session)
                await asyncio.sleep(_RELIST_S)
        finally:
            for wait in waits:
                wait.cancel()

    def _check(self, session: ClientSession) -> None:
        """Sends a ping after a call that failed; without one it is connected to
        again."""
        if self._checking or session is not self._session:
            return
        self._checking = True
        task = asyncio.ensure_future(self._ping(session))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def _ping(self, session: ClientSession) -> None:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, EmptyResult, PingRequest

        pinging = asyncio.ensure_future(session.send_request(PingRequest(), EmptyResult))
        try:
            done, _ = await asyncio.wait((pinging,), timeout=_PING_S)
            if not done:
                pinging.cancel()
                self._left.add(pinging)
                pinging.add_done_callback(self._left.discard)
                if self._is_silent():
                    self._useless.set()
                return
            pinging.result()
        except MCPError as error:
            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):
                self._useless.set()
        except Exception:
            self._useless.set()
        finally:
            self._checking = False

    def _is_silent(self) -> bool:
        """True if it cannot be busy with a call."""
        silent_s = time.monotonic() - self._lists.heard_s
        return not self._num_waiting or silent_s > self.settings.call_timeout_seconds

    def _up(self, session: ClientSession) -> None:
        self._session, self.fault, self._told = session, None, None
        self._up_s = time.monotonic()
        self.settled.set()
        logger.info("MCP server %s: %d tools", self.settings.name, len(self.tools))

    def _down(self, fault: str) -> None:
        self.fault = fault.partition(":")[0]
        self.settled.set()
        if fault != self._told:
            logger.warning("MCP server %s: %s; it is tried again", self.settings.name, fault)
            self._told = fault


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    """Why a connection ended, without what was asked or answered."""
    error = _leaf(error)
    if isinstance(error, _LostError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, OSError):
        return f"it cannot be started: {error.strerror or type(error).__name__}"
    return f"it cannot be reached ({type(error).__name__})"


def _failed(error: Exception) -> ToolResult:
    from mcp.shared.exceptions import MCPError

    error = _leaf(error)  # type: ignore[assignment]
    if isinstance(error, MCPError):
        return failure(excerpt(error.error.message, 500), error.code)
    return failure("the tool's answer cannot be read")
