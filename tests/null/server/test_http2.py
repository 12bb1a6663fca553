"""HTTP/2 from clients that are early, late, broken or hostile: what each may cost the others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from vllmx_server.config import ServerConfig
from vllmx_server.host.address import bind
from vllmx_server.http.connections.connection import Connection
from vllmx_server.http.connections.frame_budget import FrameBudget
from vllmx_server.http.connections.http2 import Http2

from tests.waiting import PATIENCE_S, until

from .conftest import MakeServer, Served, body_for

BIG = b"x" * (300 << 10)
"""More than a window of flow control."""


@dataclass
class Client:
    """A connection of the h2 library, for which nothing is checked that it sends."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    h2: H2Connection
    statuses: dict[int, int] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))
    ended: set[int] = field(default_factory=set)
    resets: dict[int, int] = field(default_factory=dict)
    gone: int | None = None
    """The error code of GOAWAY."""
    pings: int = 0
    """Answered."""
    gives_back: bool = True
    """Whether what came opens the window again."""

    def open(self, path: str, *more: tuple[str, str], method: str = "GET", end: bool = True) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        pseudo = [
            (":method", method),
            (":authority", "localhost"),
            (":scheme", "http"),
            (":path", path),
        ]
        self.h2.send_headers(stream_id, [*pseudo, *more], end_stream=end)
        return stream_id

    async def post(self, path: str, body: bytes, *more: tuple[str, str]) -> int:
        """Sends all of it, as far as the windows are opened."""
        media = ("content-type", "application/json")
        stream_id = self.open(path, media, *more, method="POST", end=False)
        while body:
            room = min(self.h2.local_flow_control_window(stream_id), 16384, len(body))
            if room:
                self.h2.send_data(stream_id, body[:room])
                body = body[room:]
            await self.turn(wait=not room)
        self.h2.end_stream(stream_id)
        return stream_id

    async def turn(self, *, wait: bool = True) -> None:
        """Sends what is ready and takes what came."""
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()
        if wait:
            data = await self.reader.read(1 << 16)
            if not data:
                raise ConnectionError("the server closed the connection")
            for event in self.h2.receive_data(data):
                self._note(event)
            self.writer.write(self.h2.data_to_send())

    def _note(self, event: Event) -> None:
        match event:
            case ResponseReceived(stream_id=int(stream_id)):
                self.statuses[stream_id] = int(dict(event.headers)[b":status"])
            case DataReceived(stream_id=int(stream_id), data=bytes(data)):
                self.bodies[stream_id] += data
                if self.gives_back:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, stream_id)
            case StreamEnded(stream_id=int(stream_id)):
                self.ended.add(stream_id)
            case StreamReset(stream_id=int(stream_id)):
                self.resets[stream_id] = int(event.error_code or 0)
            case PingAckReceived():
                self.pings += 1
            case ConnectionTerminated():
                self.gone = int(event.error_code or 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self.turn()

    async def answer(self, stream_id: int) -> int:
        """The status of a whole answer."""
        await self.until(lambda: stream_id in self.ended)
        return self.statuses[stream_id]

    async def flood(self, frames: Iterable[Frame]) -> int | None:
        """The error code of the GOAWAY that follows; the server may close while we still send."""
        answer = asyncio.ensure_future(_goaway(self.reader))
        try:
            for frame in frames:
                self.writer.write(frame.serialize())
                await self.writer.drain()
        except ConnectionError:
            pass
        return await answer


async def _goaway(reader: asyncio.StreamReader) -> int | None:
    """The error code of the first GOAWAY, whatever else comes."""
    code = None
    try:
        while code is None:
            head = memoryview(await reader.readexactly(9))
            frame, size = Frame.parse_frame_header(head)
            body = memoryview(await reader.readexactly(size))
            if isinstance(frame, GoAwayFrame):
                frame.parse_body(body)
                code = frame.error_code
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    return code


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[Client]:
    reader, writer = await served.connect()
    h2 = H2Connection(H2Configuration(header_encoding=None, validate_outbound_headers=False))
    h2.initiate_connection()
    client = Client(reader, writer, h2)
    await client.turn()
    yield client


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    async with connected(served) as client:
        yield client


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterable[None]:
    yield
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", [], 401),
        ("/nothing", [("authorization", "Bearer key")], 404),
        ("/v1/completions", [("authorization", "Bearer key"), ("content-type", "x/y")], 415),
        ("/v1/completions", [("authorization", "Bearer key"), ("content-length", "1")], 413),
    ],
)
async def test_an_answer_before_the_body_ends_no_other_stream(
    make_server: MakeServer, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    limits = {"api_key": ("key",), "max_body_bytes": 100_000}
    async with make_server(limits, step_s=0.01) as served, connected(served) as client:
        request = {"prompt": "a", "max_tokens": 30, "stream": True}
        body = json.dumps(body_for("/v1/completions", request)).encode()
        key = ("authorization", "Bearer key")
        stream = await client.post("/v1/completions", body, key)
        if status == 415:
            media = [item for item in headers if item[0] == "content-type"]
            wrong = client.open(path, headers[0], *media, method="POST", end=False)
            await client.until(lambda: wrong in client.statuses)
            sent = [wrong]
        else:
            headers = [item for item in headers if item[0] != "content-length"]
            sent = [await client.post(path, BIG, *headers) for _ in range(5)]
            sent += [await client.post(path, b"{}", *headers) for _ in range(5) if status != 413]
        for stream_id in sent:
            assert await client.answer(stream_id) == status
        assert await client.answer(stream) == 200
        assert client.bodies[stream].endswith(b"data: [DONE]\n\n")
        assert client.gone is None
        assert not client.resets


async def test_windows_are_given_back_for_bodies_that_nobody_reads(client: Client) -> None:
    """Twenty windows of the connection, dropped; after it a body that is read still fits."""
    for _ in range(4):
        assert await client.answer(await client.post("/nothing", BIG)) == 404
    assert await client.answer(client.open("/health")) == 200
    assert client.h2.outbound_flow_control_window > 40_000
    body = json.dumps(body_for("/v1/completions", {"prompt": "a" * 200, "max_tokens": 1})).encode()
    assert await client.answer(await client.post("/v1/completions", body)) == 200


async def test_a_stream_whose_body_stops_does_not_stop_others(client: Client) -> None:
    held = [
        client.open(
            "/v1/completions", ("content-type", "application/json"), method="POST", end=False
        )
        for _ in range(20)
    ]
    for stream_id in held:
        client.h2.send_data(stream_id, b"x" * 3000)
    assert await client.answer(client.open("/health")) == 200
    assert not client.ended.intersection(held)


async def test_more_requests_than_hypercorn_allows_a_connection(client: Client) -> None:
    for _ in range(1100):
        stream_id = client.open("/health/live")
        assert await client.answer(stream_id) == 200
    assert client.gone is None


def resets(count: int) -> Iterable[Frame]:
    for stream_id in range(1, 2 * count, 2):
        block = bytes.fromhex("838604") + b"\x0f/v1/completions" + b"\x41\x09localhost"
        yield HeadersFrame(stream_id, block, flags=["END_HEADERS"])
        yield DataFrame(stream_id, b'{"prompt": "a"}' * 20)
        yield RstStreamFrame(stream_id, 8)


def headers_without_end() -> Iterable[Frame]:
    yield HeadersFrame(1, bytes.fromhex("8286"), flags=[])
    for _ in range(5000):
        yield ContinuationFrame(1, b"")


FLOODS: dict[str, Callable[[], Iterable[Frame]]] = {
    "rapid resets": lambda: resets(20_000),
    "ping": lambda: (PingFrame(0, b"12345678") for _ in range(20_000)),
    "settings": lambda: (SettingsFrame(0, {4: 65535 - n % 2}) for n in range(20_000)),
    "priority": lambda: (PriorityFrame(2 * n + 1, 0, 5) for n in range(20_000)),
    "window": lambda: (WindowUpdateFrame(0, 1) for _ in range(20_000)),
    "continuation": headers_without_end,
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_ends_its_connection_alone(served: Served, name: str) -> None:
    async with connected(served) as other, connected(served) as client:
        async with asyncio.timeout(PATIENCE_S):
            code = await client.flood(FLOODS[name]())
        wanted = ErrorCodes.PROTOCOL_ERROR if name == "continuation" else None
        assert code == (wanted or ErrorCodes.ENHANCE_YOUR_CALM)
        assert await other.answer(other.open("/health")) == 200
        await served.becomes_idle()


async def test_a_flood_of_empty_data(served: Served) -> None:
    async with connected(served) as client:
        media = ("content-type", "application/json")
        stream_id = client.open("/v1/completions", media, method="POST", end=False)
        await client.turn(wait=False)
        code = await client.flood(DataFrame(stream_id, b"") for _ in range(20_000))
        assert code == ErrorCodes.ENHANCE_YOUR_CALM


async def test_streams_that_are_reset_at_once_reach_no_route(served: Served) -> None:
    async with connected(served) as client:
        before = (await served.metrics()).get("vllmx:http_requests_total", 0)
        client.writer.write(b"".join(frame.serialize() for frame in resets(20)))
        await client.turn(wait=False)
        client.h2 = H2Connection(H2Configuration(header_encoding=None))
        async with connected(served) as other:
            assert await other.answer(other.open("/health")) == 200
        after = await served.metrics()
        assert after.get("vllmx:http_requests_total", 0) - before <= 2


async def test_a_connection_whose_last_stream_is_reset_is_idle(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends when it stays idle, and is among those that are closed for others."""
    said: list[bool] = []
    set_idle = Connection._set_idle

    def note(connection: Connection, idle: bool) -> None:
        said.append(idle)
        set_idle(connection, idle)

    monkeypatch.setattr(Connection, "_set_idle", note)
    async with make_server(step_s=0.01) as served, connected(served) as client:
        body = body_for("/v1/completions", {"prompt": "a", "max_tokens": 500, "stream": True})
        streams = [await client.post("/v1/completions", json.dumps(body).encode()) for _ in "ab"]
        await client.until(lambda: client.bodies.keys() == set(streams))
        for stream_id in streams:
            assert not said[-1]
            client.h2.reset_stream(stream_id)
            ping = client.pings
            client.h2.ping(b"whenread")
            await client.until(lambda before=ping: client.pings > before)  # type: ignore[misc]
        assert said[-1]
        assert await client.answer(client.open("/health")) == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health\xe9", 400),
        ("GET", "health", 400),
        ("CONNECT", "/health", 405),
        ("G\xcbT", "/health", 405),
    ],
)
async def test_requests_that_are_none_are_answered(
    client: Client, method: str, path: str, status: int
) -> None:
    stream_id = client.open(path, method=method)
    await client.until(lambda: stream_id in client.ended or client.gone is not None)
    assert client.gone is not None or client.statuses[stream_id] == status
    if client.gone is None:
        assert await client.answer(client.open("/health")) == 200


async def test_a_client_that_reads_nothing_is_forgotten_when_it_leaves(served: Served) -> None:
    """Answers to the client wait for a window of no bytes; the tasks that wait end with the
    connection."""
    before = len(asyncio.all_tasks())
    async with connected(served) as client:
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        streams = [client.open("/nothing") for _ in range(10)]
        await client.until(lambda: len(client.statuses) == len(streams))
        assert len(asyncio.all_tasks()) >= before + len(streams)
        client.writer.transport.abort()
    await until(lambda: len(asyncio.all_tasks()) < before + len(streams))


@pytest.mark.parametrize("path", ["/nothing", "/metrics", "/health"])
async def test_a_stream_that_nobody_takes_ends_in_time(make_server: MakeServer, path: str) -> None:
    """It alone: its connection goes on, and no task of it is left."""
    async with make_server({"send_timeout_s": 0.1}) as served, connected(served) as client:
        before = len(asyncio.all_tasks())
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        stuck = [client.open(path) for _ in range(3)]
        await client.until(lambda: len(client.statuses) == 3)
        await client.until(lambda: client.resets.keys() == set(stuck))
        assert set(client.resets.values()) == {ErrorCodes.CANCEL}
        await until(lambda: len(asyncio.all_tasks()) <= before)
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65535})
        assert await client.answer(client.open("/nothing")) == 404
        assert client.gone is None


@pytest.mark.parametrize("slowest", [0, 240])
async def test_a_slow_stream_has_all_the_time_that_it_needs(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, slowest: int
) -> None:
    """Its window opens a little before each look, for which a busy machine's timer may be early."""
    loop, looks = asyncio.get_running_loop(), list[Callable[[], object]]()
    call_later = loop.call_later

    def noted(delay: float, callback: Any, *rest: Any, **more: Any) -> asyncio.TimerHandle:
        if getattr(callback, "__name__", "") == "look":
            looks.append(callback)
        return call_later(delay, callback, *rest, **more)

    monkeypatch.setattr(loop, "call_later", noted)
    monkeypatch.setattr("vllmx_server.http.connections.timeouts.SLOWEST", slowest)
    async with make_server({"send_timeout_s": 3600.0}) as served, connected(served) as client:
        client.gives_back = False
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.open("/nothing")
        await client.until(lambda: stream_id in client.statuses)
        await until(lambda: bool(looks))
        for size in range(1, 3 if slowest else 20):
            client.h2.increment_flow_control_window(1, stream_id)
            await client.until(lambda size=size: len(client.bodies[stream_id]) == size)  # type: ignore[misc]
            looks.pop()()
            assert slowest or len(looks) == 1, "it looks again"
        if slowest:
            await client.until(lambda: stream_id in client.resets)
            return
        client.h2.increment_flow_control_window(4096, stream_id)
        assert await client.answer(stream_id) == 404


async def test_a_bug_costs_one_connection_and_says_where(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(served) as client:

        async def broken(self: Http2, event: object) -> None:
            raise ValueError("".join(("sec", "ret")))

        with monkeypatch.context() as patch:
            patch.setattr(Http2, "_begin", broken)
            client.open("/health")
            await client.until(lambda: client.gone is not None)
        assert client.gone == ErrorCodes.INTERNAL_ERROR
        async with connected(served) as other:
            assert await other.answer(other.open("/health")) == 200
    assert "in broken" in caplog.text
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
    caplog.clear()


def test_a_budget_refills() -> None:
    now = 0.0
    budget = FrameBudget(10, 2, lambda: now)
    assert budget.take(10)
    assert not budget.take(1)
    now = 1.0
    assert budget.take(1)
    now = 100.0
    assert budget.take(10)
    assert not budget.take(1)


def test_small_frames_do_not_wait_for_an_ack() -> None:
    """asyncio sets TCP_NODELAY by the protocol of an accepted socket, inherited from this one."""
    listener, _ = bind(ServerConfig(port=0))
    with listener:
        assert listener.proto == socket.IPPROTO_TCP
