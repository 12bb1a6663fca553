"""Transports to MCP servers, over standard streams and over HTTP, which read within bounds."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import excerpt

from vllmx_server.mcp import guard
from vllmx_server.mcp.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    import httpx2
    from mcp.client._transport import TransportStreams
    from mcp_types import JSONRPCMessage


MAX_MESSAGE_BYTES = 4 << 20
"""Longer messages are not read."""
MAX_NOISE_BYTES = 1 << 20
"""The most bytes, in all, of lines that are not messages: some servers greet."""
_ENDS = 256
_ID = rb'"id"\s*:\s*(\d{1,9})\s*'
_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?' + _ID + rb",")
_LAST = re.compile(_ID + rb'(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


class BabbleError(Exception):
    """The server does not speak the protocol."""


@dataclass(frozen=True, slots=True)
class Unread:
    """An answer of which only that is known to what it is one."""

    request_id: int
    reason: str


class MessageLines:
    """Puts lines together out of what comes."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._size = 0
        self._is_large = False
        self._tail = b""
        """The last bytes of a line that is too long; `_line` has its beginning then."""
        self._noise = 0

    def feed(self, data: bytes) -> Iterator[bytes | Unread]:
        """Lines that may be messages, and answers that are too large. Raises BabbleError."""
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._add(piece)
            yield from self._end()
        self._add(rest)

    def unread(self, line: bytes) -> Unread | None:
        """The request that an unreadable line answers. Raises BabbleError for too many of them."""
        self._note_noise(len(line))
        found = _FIRST.match(line) or _LAST.search(line[-_ENDS:])
        return None if found is None else Unread(int(found[1]), "the answer cannot be read")

    def _note_noise(self, num_bytes: int) -> None:
        self._noise += num_bytes + 1
        if self._noise > MAX_NOISE_BYTES:
            raise BabbleError("it writes lines that are not messages")

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._max_bytes:
            self._line += piece
            return
        if not self._is_large:
            self._is_large, self._tail = True, bytes(self._line[-_ENDS:])
            self._line = (self._line + piece[:_ENDS])[:_ENDS]
        self._tail = (self._tail + piece[-_ENDS:])[-_ENDS:]

    def _end(self) -> Iterator[bytes | Unread]:
        line, tail, is_large = bytes(self._line), self._tail, self._is_large
        self._line, self._tail, self._size, self._is_large = bytearray(), b"", 0, False
        if is_large:
            found = _FIRST.match(line) or _LAST.search(tail)
            if found is None:
                raise BabbleError(f"it writes lines of more than {self._max_bytes} bytes")
            yield Unread(int(found[1]), "the answer is larger than what is read of one")
        elif line.lstrip().startswith(b"{"):
            yield line
        elif line.strip():
            self._note_noise(len(line))


class Pace:
    """The rate at which a server is read, so that reading it leaves time for others."""

    MESSAGES_PER_S = 2000.0
    BYTES_PER_S = 8e6
    SKIPPED_BYTES_PER_S = 128e6
    _BURST_S = 1.0

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._seen_s = time.monotonic()

    def wait_s(self, num_messages: int, num_bytes: int, num_skipped: int) -> float:
        """Seconds to wait before the next read."""
        now_s = time.monotonic()
        self._debt_s = max(0.0, self._debt_s - (now_s - self._seen_s))
        self._seen_s = now_s
        self._debt_s += num_messages / self.MESSAGES_PER_S + num_bytes / self.BYTES_PER_S
        self._debt_s += num_skipped / self.SKIPPED_BYTES_PER_S
        return max(0.0, self._debt_s - self._BURST_S)


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
        try:
            if self._has_left:
                await self._left(_CODE_S)
            self._tasks[1].cancel()  # it closes the server's input
            if self._process.stdin is not None:
                self._process.stdin.close()
            await self._left(_LEAVE_S)
        finally:  # also where this is cancelled, perhaps twice
            self.let_go()
            try:
                await self._left(_KILLED_S)
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
            finally:  # pipes may be left
                self._process._transport.close()  # type: ignore[attr-defined]

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


_CONNECT_S = 10.0


@asynccontextmanager
async def http_transport(settings: ServerSettings) -> AsyncIterator[TransportStreams]:
    """The transport of one connection, for `mcp.Client`."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    assert settings.url is not None
    wait_s = max(settings.call_timeout_seconds, settings.start_timeout_seconds)
    client = httpx2.AsyncClient(
        headers={**settings.headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_S, read=wait_s + _CONNECT_S),
        event_hooks={"response": [_bound]},
    )
    async with (
        client,
        streamable_http_client(
            settings.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
        ) as streams,
    ):
        yield streams


async def _bound(response: httpx2.Response) -> None:
    """Ends an answer that is too long to be one message. Events are bounded one by one, and those
    that answer a GET go on for as long as the connection does."""
    import httpx2

    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.DecodingError("it compresses what was asked for as it is")
    kind = response.headers.get("content-type", "").lower()
    has_events = kind.startswith("text/event-stream") and not response.is_redirect
    response.stream = _bounded(response.stream, None if has_events else MAX_MESSAGE_BYTES)


def _bounded(stream: Any, max_bytes: int | None) -> httpx2.AsyncByteStream:
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes, pace = 0, Pace()
            async for data in stream:
                num_bytes += len(data)
                if max_bytes is not None and num_bytes > max_bytes:
                    raise httpx2.StreamError(f"it is longer than {max_bytes} bytes")
                yield data
                await asyncio.sleep(pace.wait_s(data.count(b"\n\n"), len(data), 0))

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()
