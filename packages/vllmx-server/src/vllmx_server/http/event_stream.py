"""Responses that hold an engine request and end it when the client leaves.

starlette's StreamingResponse starts a task group and a memory stream for each response; at hundreds
of streams that costs as much as the events themselves. Here the request's own task writes
ready-made bytes, and is interrupted when the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import WriteTransport
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, Self

from hypercorn.protocol.http_stream import HTTPStream
from starlette.types import Receive, Scope, Send
from vllmx_core.errors import VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.errors import error_body, internal_error
from vllmx_server.http.connections.connection import Connection
from vllmx_server.http.connections.http1 import Http1
from vllmx_server.http.disconnect import Interruption

PING = b": ping\n\n"
"""Clients skip lines that begin with a colon."""


class Pings:
    """Calls `ping` whenever a stream has sent nothing for at most `interval_s`, since proxies close
    silent connections. A timer checks twice an interval whether anything was sent.

    Args:
        interval_s: 0: never.
        num_sent: the number of events sent, with pings; None while one is being sent.
        ping: sends a comment, or returns an awaitable that does.
    """

    def __init__(
        self,
        interval_s: float,
        num_sent: Callable[[], int | None],
        ping: Callable[[], Awaitable[None] | None],
    ) -> None:
        self._half_s = interval_s / 2
        self._num_sent = num_sent
        self._ping = ping
        self._before: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Starts pings; `stop` must follow."""
        self._before = self._num_sent()
        self._wait()

    async def finish(self) -> None:
        """Waits for a ping that is being sent, so that the next event does not get into it."""
        if self._sending is not None:
            await self._sending
            self._sending = None

    def stop(self) -> None:
        """Ends the pings."""
        for pending in (self._timer, self._sending):
            if pending is not None:
                pending.cancel()

    def _wait(self) -> None:
        if self._half_s:
            self._timer = asyncio.get_running_loop().call_later(self._half_s, self._look)

    def _look(self) -> None:
        now = self._num_sent()
        if now is not None and now == self._before:
            rest = self._ping()
            if rest is not None:
                self._sending = asyncio.ensure_future(rest)
        self._before = now  # without the ping: the next look sees it, and the one after pings again
        self._wait()


logger = logging.getLogger("vllmx.server")
DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True, slots=True)
class Framing:
    """Events of a stream that are not part of its answer."""

    failed: Callable[[VllmxError], bytes]
    """The last event of a stream that fails."""
    ping: bytes = PING
    """Empty: such streams have none."""
    media_type: bytes = b"text/event-stream; charset=utf-8"


OPENAI = Framing(lambda error: b"data: " + error_body(error) + b"\n\n" + DONE)


class Held(Protocol):
    """The work of the engine for one HTTP request."""

    def close(self) -> None:
        """Aborts what has not ended. May be called twice."""
        ...

    def divert(
        self,
        is_free: Callable[[], bool],
        make: Callable[[str, list[int]], bytes],
        write: Callable[[bytes], None],
    ) -> None:
        """Writes new output at once from now on, while `is_free()`; `make` encodes text and
        tokens. Does nothing where a request has several prompts or choices."""
        ...


class DirectBody:
    """The body of one HTTP/1.1 response whose start has been sent, without a content-length: its
    chunks go straight to the transport.

    On its way through hypercorn and h11, which keep no state of a chunk, an event takes four
    coroutines, a lock and five objects, as much as all of our own work for it. Slow clients, HTTP/2
    and other servers take the usual way.

    Attributes:
        num_written: chunks so far.
    """

    def __init__(self, transport: WriteTransport) -> None:
        self._transport = transport
        self.num_written = 0

    @classmethod
    def of(cls, send: Send) -> Self | None:
        """`send` as the server gave it to the application; None: it must be used."""
        stream = getattr(send, "__self__", None)
        if not isinstance(stream, HTTPStream) or stream.scope["http_version"] != "1.1":
            return None
        protocol = getattr(stream.send, "__self__", None)
        if not isinstance(protocol, Http1):
            return None
        server = getattr(protocol.send, "__self__", None)
        return cls(server.writer.transport) if isinstance(server, Connection) else None

    def is_free(self) -> bool:
        """True if a chunk may be written; else send it, which waits for the client."""
        transport = self._transport
        return not (transport.get_write_buffer_size() or transport.is_closing())

    def write(self, data: bytes) -> None:
        """Writes a chunk; only if `is_free`."""
        self.num_written += 1
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class HeldResponse:
    """An ASGI response whose body is made while the client waits.

    At its end, the generation is closed and then `release` is called, once. A client that leaves,
    or takes nothing for `send_timeout_s`, cancels the work; ClientDisconnect is raised then.
    """

    def __init__(
        self, generation: Held, release: Callable[[], None], send_timeout_s: float
    ) -> None:
        self._generation = generation
        self._release = release
        self._send_timeout_s = send_timeout_s
        self._num_sent = 0
        self._sending = False
        self._looking: asyncio.TimerHandle

    async def respond(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with Interruption(receive) as interruption:
                self._look(interruption, None)
                await self.respond(scope, send)
        finally:
            self._looking.cancel()
            self._generation.close()
            self._release()

    def _look(self, interruption: Interruption, before: int | None) -> None:
        """Interrupts if one send has hung since the last look, and looks again later."""
        now = self._num_sent if self._sending else None
        if now is not None and now == before:
            interruption.client_left()
            return
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(self._send_timeout_s, self._look, interruption, now)


class JSONAnswer(HeldResponse):
    """One JSON body, awaited; its errors are raised, so that they get their status. A body of
    several pieces goes out as they are made, without a length, and others run in between."""

    def __init__(
        self,
        generation: Held,
        release: Callable[[], None],
        send_timeout_s: float,
        make: Callable[[], Awaitable[Iterator[bytes]]],
    ) -> None:
        super().__init__(generation, release, send_timeout_s)
        self._make = make

    async def respond(self, scope: Scope, send: Send) -> None:
        pieces = await self._make()
        piece, following = next(pieces), next(pieces, None)
        headers = [(b"content-type", b"application/json")]
        if following is None:
            headers.append((b"content-length", str(len(piece)).encode()))
        self._sending = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while following is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._num_sent += 1
            await asyncio.sleep(0)
            piece, following = following, next(pieces, None)
        await send({"type": "http.response.body", "body": piece})


class EventStream(HeldResponse):
    """Server-sent events: each item of `events` (bytes with their framing) goes out at once, and a
    ping where there is none for `ping_interval_s`.

    The status is sent with the first event or ping, so that what fails before has its own
    status; what fails later becomes an event of its own.

    Args:
        make: makes an event of text and tokens in the middle of the answer, which then go from the
            core's frame to the connection in one call while the client keeps up. None: all events
            come through `events`.
    """

    def __init__(
        self,
        generation: Held,
        release: Callable[[], None],
        send_timeout_s: float,
        events: AsyncGenerator[bytes, None],
        ping_interval_s: float = 0.0,
        framing: Framing = OPENAI,
        make: Callable[[str, list[int]], bytes] | None = None,
    ) -> None:
        super().__init__(generation, release, send_timeout_s)
        self._events = events
        self._make = make
        self._framing = framing
        self._pings = Pings(ping_interval_s, self._sent_so_far, self._ping)
        self._begun = False
        self._direct: DirectBody | None = None
        self._scope: Scope
        self._send: Send

    async def respond(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._pings.start()
        try:
            async with aclosing(self._events) as events:
                await self._send_all(events)
        except VllmxError as error:
            await self._fail(error, error)
        except Exception as error:
            await self._fail(error, internal_error())
        finally:
            self._pings.stop()

    async def _send_all(self, events: AsyncGenerator[bytes, None]) -> None:
        await self._put(await anext(events))
        if self._direct is not None and self._make is not None:
            self._generation.divert(self._is_free, self._make, self._direct.write)
        last = b""
        async for event in events:
            if event.endswith(DONE):
                last = event  # it goes out with the end of the body
            elif self._is_free():
                self._write(event)
            else:
                await self._put(event)
        await self._put(last, more_body=False)

    def _is_free(self) -> bool:
        """An event may be written past the server's protocols."""
        return self._direct is not None and not self._sending and self._direct.is_free()

    def _write(self, data: bytes) -> None:
        assert self._direct is not None
        self._direct.write(data)

    async def _fail(self, error: Exception, shown: VllmxError) -> None:
        """Raises the error while it can have a status of its own."""
        await self._pings.finish()
        if not self._begun:
            raise error
        if shown is not error:
            name, where = self._scope["state"]["request_id"], private_traceback(error)
            logger.error("unhandled error in the event stream of request %s\n%s", name, where)
        await self._put(self._framing.failed(shown))
        await self._put(b"", more_body=False)

    async def _put(self, body: bytes, more_body: bool = True) -> None:
        await self._pings.finish()
        await self._transmit(body, more_body)

    async def _transmit(self, body: bytes, more_body: bool = True) -> None:
        self._sending = True
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", self._framing.media_type), *_EVENT_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._send = self._scope["state"]["send"]
            self._direct = DirectBody.of(self._send)
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
        self._sending = False
        self._num_sent += 1

    def _sent_so_far(self) -> int | None:
        past = 0 if self._direct is None else self._direct.num_written
        return None if self._sending else self._num_sent + past

    def _ping(self) -> Awaitable[None] | None:
        ping = self._framing.ping
        if not self._is_free():
            return self._transmit(ping)
        self._write(ping)
        return None
