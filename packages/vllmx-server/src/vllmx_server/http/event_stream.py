"""Responses that hold an engine request: they end it when the client goes away.

starlette's StreamingResponse starts a task group and a memory stream for each response; at hundreds
of streams that costs as much as the events themselves. Here the request's own task writes
ready-made bytes, and is interrupted when the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive, Scope, Send
from vllmx_core.errors import VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.errors import error_body, internal_error
from vllmx_server.http.direct_body import DirectBody
from vllmx_server.http.disconnect import Interruption
from vllmx_server.http.pings import PING, Pings

logger = logging.getLogger("vllmx.server")
DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Framing:
    """What a stream says besides its answer."""

    failed: Callable[[VllmxError], bytes]
    """The last event of a stream that fails."""
    ping: bytes = PING


OPENAI = Framing(lambda error: b"data: " + error_body(error) + b"\n\n" + DONE)


class Held(Protocol):
    """What goes on in the engine for one HTTP request."""

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


class HeldResponse:
    """An ASGI response whose body is made while the client waits.

    However it ends, the generation is closed and then `release` is called, once. A disconnect
    cancels the work, and so does a client that takes nothing for `send_timeout_s`; ClientDisconnect
    is raised then.
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
        """Interrupts when one send has hung since the last look, and looks again later."""
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
        make: what goes out of text and tokens in the middle of the answer. With it those go from
            the core's frame to the connection in one call, while the client takes what it gets;
            None: everything comes through `events`.
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
            start = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
            await self._send(start)
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
