"""An MCP server as a process of ours: its lines, and its end with us.

The package `mcp` has such a transport, too, which reads lines of any length and logs what they say;
this one is bounded, and what it starts ends with us however we end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import excerpt

from vllmx_server.mcp import guard
from vllmx_server.mcp.lines import BabbleError, MessageLines, Pace, TooLarge
from vllmx_server.mcp.settings import ServerSettings

if TYPE_CHECKING:
    from types import TracebackType

    from mcp.client._transport import TransportStreams

_RECEIVE_BYTES = 1 << 16
_LEAVE_S = 2.0
"""For a server to end by itself once its input has."""
_KILLED_S = 5.0
_STDERR_BYTES = 2000


class StdioTransport:
    """One life of a server's process, as `mcp.Client` takes it.

    Attributes:
        ended: set when no more will come of it.
        reason: why, for people.
        last_words: the end of what it wrote to standard error.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._process: Process
        self._life = -1
        self._tasks: list[asyncio.Task[None]] = []
        self.ended = asyncio.Event()
        self.reason = "it ended"
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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), within_s)

    async def _read(self, to_session: Any) -> None:
        """Until it ends, babbles, or nobody listens any more."""
        import anyio

        try:
            async with to_session:
                await self._read_all(to_session)
            await self._left(_LEAVE_S)
            code = self._process.returncode
            self.reason = "it closed its output" if code is None else f"it ended with code {code}"
        except BabbleError as error:
            self.reason = str(error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass
        finally:
            self.ended.set()

    async def _read_all(self, to_session: Any) -> None:
        from mcp.shared.message import SessionMessage
        from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

        assert self._process.stdout is not None
        lines, pace = MessageLines(), Pace()
        while data := await self._process.stdout.read(_RECEIVE_BYTES):
            num_messages = num_bytes = 0
            for line in lines.feed(data):
                num_messages += 1
                if isinstance(line, TooLarge):
                    text = "the answer is larger than what is read of one"
                    error = ErrorData(code=INTERNAL_ERROR, message=text)
                    answer = JSONRPCError(jsonrpc="2.0", id=line.request_id, error=error)
                    await to_session.send(SessionMessage(answer))
                    continue
                num_bytes += len(line)
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    lines.note_noise(len(line))
                else:
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
        """To standard error, which is kept for who asks why it ended."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_RECEIVE_BYTES):
            self.last_words = (self.last_words + data)[-_STDERR_BYTES:]

    @property
    def last_line(self) -> str:
        """Of standard error, for the log; may be empty."""
        lines = self.last_words.decode(errors="replace").strip().splitlines()
        return excerpt(lines[-1].strip()) if lines else ""
