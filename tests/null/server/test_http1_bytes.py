"""Whatever bytes come over HTTP/1.1, nothing is left behind: no sockets, no time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import pytest
from hypercorn.asyncio.worker_context import WorkerContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllmx_server.http.connections.connection import Connection, Shared
from vllmx_server.http.connections.safe_headers import AnswerConfig
from vllmx_server.http.connections.timeouts import Timeouts

Asked = tuple[str, str, bytes, list[tuple[bytes, bytes]], bytes | None]


class MemoryTransport(asyncio.Transport):
    """Keeps what is written, and tells its protocol of its end."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.protocol: Any = None
        self.has_ended, self._is_closing = False, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        known = {"peername": ("127.0.0.1", 2), "sockname": ("127.0.0.1", 1)}
        if name == "socket":
            return type("Socket", (), {"family": socket.AF_INET})
        return known.get(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: Any) -> None:
        assert not self.has_ended, "written after the end"
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self.has_ended = True
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_reading(self) -> bool:
        return True


@dataclass
class Told:
    """What one way of reading made of some bytes."""

    asked: list[Asked] = field(default_factory=list)
    """What the application was asked, with the body where it has read it."""
    answers: list[tuple[int, list[tuple[bytes, bytes]], bytes]] = field(default_factory=list)
    has_ended: bool = False
    rest: bytes = b""
    """What was written and is no answer."""


async def application(told: Told, scope: Any, receive: Any, send: Any) -> None:
    """Reads the body unless the path says otherwise, and answers with or without a length."""
    assert scope["type"] == "http"
    assert (scope["scheme"], scope["client"]) == ("http", ("127.0.0.1", 2))
    path = scope["path"]
    body: bytes | None = None
    if "unread" not in path:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    told.asked.append((scope["method"], path, scope["query_string"], headers, body))
    answer = json.dumps([scope["method"], path, len(body or b"")]).encode()
    if "chunks" in path:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer, "more_body": True})
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"last"})
        return
    if scope["method"] == "HEAD":
        answer = b""
    length = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": answer})


class MemoryConnection(Connection):
    """A connection over a transport of memory."""

    def __init__(self, shared: Shared, transport: MemoryTransport) -> None:
        super().__init__(shared, lambda _: None)
        self._transport = transport

    async def _open(self, accepted: socket.socket | None) -> None:
        self.reader = asyncio.StreamReader(1 << 16)
        protocol = asyncio.StreamReaderProtocol(self.reader)
        protocol.connection_made(self._transport)
        self._transport.protocol = protocol
        loop = asyncio.get_running_loop()
        self.writer = asyncio.StreamWriter(self._transport, protocol, self.reader, loop)


async def _quiet(transport: MemoryTransport, rounds: int = 40) -> None:
    """Returns when nothing more is written: all that goes on here is done by the loop itself."""
    before = -1
    while before != len(transport.written):
        before = len(transport.written)
        for _ in range(rounds):
            await asyncio.sleep(0)


class _Errors(logging.Handler):
    """Whatever is logged as a warning or worse, and what the event loop complains of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


async def _told(pieces: list[bytes], most: int) -> Told:
    told, transport, config = Told(), MemoryTransport(), AnswerConfig()
    config.include_server_header = config.include_date_header = False
    config.keep_alive_max_requests = most
    config.errorlog = logging.getLogger("vllmx.hypercorn")
    app = partial(application, told)
    shared = Shared(app, config, WorkerContext(None), None, Timeouts(600, 600))
    errors = _Errors()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.seen.append(context))
    logging.getLogger("vllmx").addHandler(errors)
    running = asyncio.ensure_future(MemoryConnection(shared, transport).run(None))  # type: ignore[arg-type]
    await _quiet(transport, 4)
    for piece in pieces:
        if transport.is_closing():
            break
        transport.protocol.data_received(piece)
        await _quiet(transport)
    told.has_ended = transport.has_ended
    if not transport.is_closing():
        transport.protocol.eof_received()
        await _quiet(transport)
    logging.getLogger("vllmx").removeHandler(errors)
    assert transport.has_ended, "a connection goes on although its client has sent its end"
    assert running.done(), "a connection goes on although its transport has ended"
    assert len(asyncio.all_tasks()) == 1, "a task goes on"
    assert not errors.seen
    _split(transport.written, told)
    return told


def _split(written: bytes, told: Told) -> None:
    """Reads the answers as an HTTP client does."""
    while written:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        client.receive_data(written)
        status, headers, body = 0, list[tuple[bytes, bytes]](), b""
        while True:
            event = client.next_event()
            if isinstance(event, h11.InformationalResponse):
                told.answers.append((event.status_code, sorted(event.headers), b""))
            elif isinstance(event, h11.Response):
                status, headers = event.status_code, sorted(event.headers)
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
        if not isinstance(event, h11.EndOfMessage):
            told.rest = written
            return
        told.answers.append((status, headers, body))
        written = client.trailing_data[0]


def _read_by_h11(data: bytes) -> list[tuple[str, list[tuple[bytes, bytes]]]]:
    """Methods and headers of the requests that h11 finds, to the first error."""
    connection, found = h11.Connection(h11.SERVER), []
    connection.receive_data(data)
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return found
        if isinstance(event, h11.Request):
            found.append((event.method.decode(), list(event.headers)))
        elif isinstance(event, h11.EndOfMessage):
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                return found
            connection.start_next_cycle()
        elif not isinstance(event, h11.Data):
            return found


def _check(pieces: list[bytes], most: int = 1000) -> Told:
    told = asyncio.run(_told(pieces, most))
    heads = [(method, headers) for method, _, _, headers, _ in told.asked]
    assert heads == _read_by_h11(b"".join(pieces))[: len(heads)], pieces
    assert told.rest == b"" or b"HEAD" in b"".join(pieces)
    return told


HOST = b"Host: localhost\r\n"
WHOLE = [
    b"GET / HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /chunks?a=1&b=%20 HTTP/1.1\r\nAccept: */*\r\nhost:a\r\n\r\n",
    b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nGET /",
    b"POST /unread HTTP/1.1\r\n" + HOST + b"Content-Length: 6\r\n\r\n\r\nGET ",
    b"POST /b HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\nConnection: keep-alive\r\n\r\n",
    b"POST /c HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"POST /d HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n"
    b"2;x=y\r\nab\r\n0\r\nX: 1\r\n\r\n",
    b"POST /e HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
    b"HEAD /f HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",
    b"GET /g HTTP/1.0\r\n\r\n",
    b"GET /h HTTP/1.0\r\nConnection: keep-alive\r\nHost: a\r\n\r\n",
    b"GET /i HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",
    b"GET /chunks HTTP/1.1\r\n" + HOST + b"Connection: Close\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /j HTTP/1.1\r\n" + HOST + b"Connection: upgrade, te\r\nUpgrade: h2c\r\nTE: x\r\n\r\n",
    b"GET /k HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",
]  # fmt: skip
ODD = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"\x0b", b"\x7f", b"\x80", b"\xff",
    b"0", b"-", b"+", b"5", b"\r\n ", b"\r\n\t", b"\n\n", b"\r\n\r\n", b"GET",
    b"PRI * HTTP/2.0\r\n", b"Content-Length: 5\r\n", b"Content-Length: 5, 5\r\n",
    b"content-length:\t1\r\n", b"Host: y\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n",
    b"Connection: x\r\n", b"Upgrade: h2c\r\n", b" HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"%",
    b"%00", b"?", b"#", b"//", b"http://a/", b"f" * 17 + b"\r\n", b"X: " + b"a" * 17_000 + b"\r\n",
]  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Requests one after another, something odd in some of them, cut into pieces anywhere."""
    data = b"".join(draw(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from((0, 0, 0, 1, 2, 9)))
        odd = draw(st.one_of(st.sampled_from(ODD), st.binary(max_size=3)))
        data = data[:at] + odd + data[at + size :]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=3)))
    ends = [*cuts, len(data)]
    return [data[a:b] for a, b in zip([0, *cuts], ends, strict=True) if a < b]


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(streams())
def test_any_bytes(pieces: list[bytes]) -> None:
    """No request but those that h11 finds reaches the application, and no task, traceback or open
    connection is left behind."""
    _check(pieces)


@pytest.mark.parametrize("request_", WHOLE)
@pytest.mark.parametrize("before", [b"", WHOLE[0], WHOLE[3]])
def test_it_matters_not_how_bytes_are_cut(request_: bytes, before: bytes) -> None:
    told = _check([before + request_])
    assert told.answers
    assert told == _check([before, *(bytes([byte]) for byte in request_)])


LONG = b"a" * 70_000
UNREAD = b"POST /unread HTTP/1.1\r\n" + HOST


@pytest.mark.parametrize(
    "pieces",
    [
        [b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 70000\r\n\r\n" + LONG, WHOLE[0]],
        [UNREAD + b"Content-Length: 65536\r\n\r\n", LONG[:65536], WHOLE[0]],
        [UNREAD + b"Content-Length: 9999999\r\n\r\n", LONG, WHOLE[0]],
        [b"GET / HTTP/1.1\r\n" + HOST + b"X: " + LONG + b"\r\n\r\n", WHOLE[0]],
        [b"GET /" + LONG, WHOLE[0]],
        [WHOLE[0] * 1500],
        [WHOLE[0], WHOLE[0] * 1500, WHOLE[0]],
        [WHOLE[2] * 40, WHOLE[5] * 40, WHOLE[2] * 40],
        [b"\r\n", WHOLE[0]],
        [WHOLE[0] + b"\r\n\r\n" + WHOLE[0]],
    ],
)  # fmt: skip
def test_long_streams(pieces: list[bytes]) -> None:
    assert _check(pieces).answers


@pytest.mark.parametrize("most", [1, 4])
def test_the_last_request_that_a_connection_may_bring(most: int) -> None:
    for pieces in ([WHOLE[0]] * 6, [WHOLE[0] * 6]):
        told = _check(pieces, most)
        assert len(told.answers) == most
        assert (b"connection", b"close") in told.answers[-1][1]
