"""HTTP/1.1 on one connection: hypercorn's protocol, made to read on while an answer is on its way.

Unlike hypercorn's, it notices at once that a client which sent further requests has left, never
offers an upgrade to HTTP/2 or to a websocket, refuses a request whose length can be read in two
ways, and reads and drops the rest of a body after an early answer, so that the client sees the
answer and not a broken connection.
"""

from __future__ import annotations

import ast
import re

import h11
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from vllmx_core.errors import VllmxError, shown

from vllmx_server.errors import BadHTTPError, error_body

MAX_AHEAD_BYTES = 1 << 16
"""Bytes of its next requests that a client may send before it has the answer."""
_MAX_DROPPED_BODY_BYTES = 1 << 20
"""A body up to this length is read to its end although its answer was sent, and the connection
goes on; with a longer one it ends."""
_TWO_WAYS = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""A line feed alone, and a header that is folded: h11 takes both."""


class Http1(H11Protocol):
    """One connection; `send` takes bytes, and events when it is idle or done."""

    connection: h11.Connection
    _bytes_ahead = 0
    _declared_bytes = 0
    _is_head = False
    _parsing = False

    @property
    def is_mid_request(self) -> bool:
        """True if a request has begun to arrive and is not being answered, or its rest arrives
        after the answer."""
        return self.connection.their_state is h11.SEND_BODY or bool(
            self.connection.trailing_data[0]
        )

    @property
    def may_have_unread(self) -> bool:
        """True if the client may still be sending: closing now would destroy the answer."""
        unfinished = self.connection.their_state in (h11.SEND_BODY, h11.ERROR)
        return unfinished or self._bytes_ahead > 0 or bool(self.connection.trailing_data[0])

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            if self.stream is not None and self.connection.their_state is not h11.SEND_BODY:
                self._bytes_ahead += len(event.data)
                if self._bytes_ahead > MAX_AHEAD_BYTES:
                    return  # the connection ends with this answer
            self.connection.receive_data(event.data)
            await self._handle_events()
        else:
            await super().handle(event)

    async def refuse(self, error: VllmxError) -> None:
        """Answers with an error and ends the connection."""
        if self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body(error)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
                *self.config.response_headers("h11"),
            ]
            status = error.http_status
            await self._send_h11_event(h11.Response(status_code=status, headers=headers))
            if not self._is_head:
                await self._send_h11_event(h11.Data(data=body))
            await self._send_h11_event(h11.EndOfMessage())
        await self.send(Closed())

    async def _handle_events(self) -> None:
        if self._parsing:
            return  # the loop below goes on with what has come
        self._parsing = True
        try:
            while await self._handle_next():
                pass
        finally:
            self._parsing = False

    async def _handle_next(self) -> bool:
        """Returns True if there may be more to handle."""
        try:
            if self.connection.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(
                    status_code=100, headers=self.config.response_headers("h11")
                )
                await self._send_h11_event(go_on)
            may_begin = self.connection.their_state is h11.IDLE
            received = self.connection.trailing_data[0] if may_begin else b""
            event = self.connection.next_event()
            if isinstance(event, h11.Request):
                self._is_head = event.method == b"HEAD"
                left = self.connection.trailing_data[0]
                head = received[: len(received) - len(left)]
                _check(event, head, is_first=self.keep_alive_requests == 0)
        except h11.RemoteProtocolError as error:
            await self.refuse(
                BadHTTPError.of(_status(error), f"no valid request: {_reason(error)}")
            )
            return False
        except BadHTTPError as error:
            await self.refuse(error)
            return False
        if isinstance(event, h11.Request):
            await self._begin(event)
        elif isinstance(event, h11.Data):
            if self.stream is not None:
                await self.stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
        elif isinstance(event, h11.EndOfMessage):
            if self.stream is not None:
                await self.stream.handle(EndBody(stream_id=STREAM_ID))
            else:
                await self._maybe_recycle()  # the answer was sent before this end had come
        else:  # more is needed, or the next request waits for the end of this one
            return False
        return True

    async def _begin(self, request: h11.Request) -> None:
        if request.http_version == b"2.0":
            raise H2ProtocolAssumedError(
                b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0]
            )
        self._declared_bytes = _declared_bytes(request)
        await self.send(Updated(idle=False))
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii"),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and self._ends_with_this_answer():
            event.headers.append((b"connection", b"close"))
        await super().stream_send(event)

    def _ends_with_this_answer(self) -> bool:
        return self._bytes_ahead > MAX_AHEAD_BYTES or (
            self.connection.their_state is h11.SEND_BODY
            and self._declared_bytes > _MAX_DROPPED_BODY_BYTES
        )

    async def _maybe_recycle(self) -> None:
        await self._close_stream()
        connection = self.connection
        goes_on = connection.our_state is h11.DONE and self._bytes_ahead <= MAX_AHEAD_BYTES
        if self.context.terminated.is_set() or not goes_on:
            await self.send(Closed())
            return
        if connection.their_state is h11.DONE:
            connection.start_next_cycle()
            self._is_head = False
            self._bytes_ahead = 0
        await self.send(Updated(idle=True))
        await self._handle_events()


def _check(request: h11.Request, head: bytes, *, is_first: bool) -> None:
    """Raises BadHTTPError for heads that proxies and servers are known to read in two ways."""
    if _TWO_WAYS.search(head):
        raise BadHTTPError("each line of a head ends with CR LF, and none goes on in the next one")
    names = {name for name, _ in request.headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise BadHTTPError("Content-Length and Transfer-Encoding exclude each other: send one")
    if b"transfer-encoding" in names and request.http_version == b"1.0":
        raise BadHTTPError("HTTP/1.0 has no Transfer-Encoding: send Content-Length")
    preface = (request.method, request.target, request.http_version) == (b"PRI", b"*", b"2.0")
    if request.http_version not in (b"1.0", b"1.1") and not (preface and is_first):
        version = request.http_version.decode()
        raise BadHTTPError(f"HTTP/{version} is not spoken here: use HTTP/1.1")


def _status(error: h11.RemoteProtocolError) -> int:
    """h11's hint, but 400 in place of 501: operators are woken for errors of the server, and this
    is the client's."""
    hint: int = error.error_status_hint
    return hint if hint < 500 else 400


def _reason(error: h11.RemoteProtocolError) -> str:
    """h11's message, with the line that it quotes as text: it writes `bytearray(b'...')`."""
    reason, _, quoted = str(error).partition(": bytearray(")
    if not quoted:
        return reason
    try:
        line: bytes = ast.literal_eval(quoted.removesuffix(")"))
    except (SyntaxError, ValueError):  # it has more to say behind it
        return reason
    return f"{reason}: {shown(line.decode('latin-1'))}"


def _declared_bytes(request: h11.Request) -> int:
    """The length of the body by its headers; more than is dropped if it comes in chunks."""
    for name, value in request.headers:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return _MAX_DROPPED_BODY_BYTES + 1
    return 0
