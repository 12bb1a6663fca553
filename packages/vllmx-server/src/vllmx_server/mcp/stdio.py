"""An MCP server as a process of ours: its lines, and its end with us.

The package `mcp` has such a transport, too, which reads lines of any length and logs what they say;
this one is bounded, and what it starts ends with us however we end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import excerpt

from vllmx_server.mcp import guard
from vllmx_server.mcp.lines import BabbleError, MessageLines, Pace, Unread
from vllmx_server.mcp.settings import ServerSettings

if TYPE_CHECKING:
    from types import TracebackType

    from mcp.client._transport import TransportStreams
    from mcp_types import JSONRPCMessage

_RECEIVE_BYTES = 1 << 16
_LEAVE_S = 2.0
"""The seconds for a server to end by itself once its input has."""
_CODE_S = 5.0
"""The seconds for it to be gone once its output has ended."""
_KILLED_S = 5.0
_POLL_S = 0.01
_STDERR_BYTES = 2000


class StdioTransport:
    """One life of a server's process, as `mcp.Client` takes it.

    Attributes:
        ended: set when the process sends no more.
        last_words: the end of what it wrote to standard error.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._process: Process
        self._life = -1
        self._tasks: list[asyncio.Task[None]] = []
        self.ended = asyncio.Event()
        self._babble: str | None = None
        self._has_left = self._leaving = False
        self.last_words = b""

    async def __aenter__(self) -> TransportStreams:
        import anyio
        from mcp.shared.message import SessionMessage

        await self._start()
        to_session, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        requests, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        self._begin(self._read(to_session))
        self._begin(self._write(from_session))
        self._begin(self._listen())
        return messages, requests

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leaving = True
        if self._has_left:
            await self._left(_CODE_S)
        self._tasks[1].cancel()  # it closes the server's input
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await self._left(_LEAVE_S)
        finally:
            self.let_go()
            await self._left(_KILLED_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            self._process._transport.close()  # type: ignore[attr-defined]  # pipes may be left

    def let_go(self) -> None:
        """Kills what is left of the process. Safe from any thread, and twice."""
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)

    async def _start(self) -> None:
        settings = self._settings
        assert settings.command is not None
        held, self._life = os.pipe()
        command = (sys.executable, "-I", "-S", str(Path(guard.__file__)), str(held))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                settings.command,
                *settings.args,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=settings.environment,
                cwd=settings.cwd,
                pass_fds=(held,),
                start_new_session=True,
            )
        except BaseException:
            self.let_go()
            raise
        finally:
            os.close(held)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _left(self, within_s: float) -> None:
        """Looks, for `Process.wait` also waits for pipes that nobody may read any more."""
        give_up_s = time.monotonic() + within_s
        while self._process.returncode is None and time.monotonic() < give_up_s:
            await asyncio.sleep(_POLL_S)

    async def _read(self, to_session: Any) -> None:
        """Reads until the server ends or babbles, or nobody listens any more."""
        import anyio

        try:
            await self._read_all(to_session)
            self._has_left = not self._leaving
        except BabbleError as error:
            self._babble = str(error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass
        finally:
            to_session.close()
            self.ended.set()

    @property
    def fault(self) -> str | None:
        """Why it ended, once it did and where that was its own doing."""
        if self._babble is not None or not self._has_left:
            return self._babble
        code = self._process.returncode
        return "it closed its output" if code is None else f"it ended with code {code}"

    async def _read_all(self, to_session: Any) -> None:
        from mcp.shared.message import SessionMessage

        assert self._process.stdout is not None
        lines, pace = MessageLines(), Pace()
        while data := await self._process.stdout.read(_RECEIVE_BYTES):
            num_messages = num_bytes = 0
            for line in lines.feed(data):
                num_messages += 1
                num_bytes += 0 if isinstance(line, Unread) else len(line)
                message = _message(line, lines)
                if message is not None:
                    await to_session.send(SessionMessage(message))
            wait_s = pace.wait_s(num_messages, num_bytes, len(data))
            if wait_s:
                await asyncio.sleep(wait_s)

    async def _write(self, from_session: Any) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            async with from_session:
                async for item in from_session:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(text.encode() + b"\n")
                    await stdin.drain()
        except OSError:
            pass  # its output ends, too
        finally:
            stdin.close()

    async def _listen(self) -> None:
        """Keeps the end of standard error, which may say why it ended."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_RECEIVE_BYTES):
            self.last_words = (self.last_words + data)[-_STDERR_BYTES:]

    @property
    def last_line(self) -> str:
        """The last line of standard error, for the log; may be empty."""
        lines = self.last_words.decode(errors="replace").strip().splitlines()
        return excerpt(lines[-1].strip()) if lines else ""


def _message(line: bytes | Unread, lines: MessageLines) -> JSONRPCMessage | None:
    """None: the line is none, nor the answer to anything."""
    from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

    if not isinstance(line, Unread):
        try:
            return jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            found = lines.unread(line)
        if found is None:
            return None
        line = found
    error = ErrorData(code=INTERNAL_ERROR, message=line.reason)
    return JSONRPCError(jsonrpc="2.0", id=line.request_id, error=error)
