"""HTTP/1.1 from raw sockets: what a client may send, when it may send it, and when it may leave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from vllmx_server.http.connections import connection as connection_module
from vllmx_server.http.connections.http1 import MAX_AHEAD_BYTES, Http1

from tests.waiting import PATIENCE_S, until

from .conftest import MakeServer, Served, request_bytes

counts_descriptors = pytest.mark.skipif(
    not Path("/dev/fd").exists(), reason="counts in /dev/fd, which is not there"
)
PATH = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 400}
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
MEGABYTE = 1 << 20


@pytest.fixture(params=["auto", "h11"])
def http1(request: pytest.FixtureRequest) -> str:
    """Every test twice: what is ordinary has a class of its own, and h11 can read it as well."""
    name: str = request.param
    return name


def num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


async def descriptors_become(most: int) -> None:
    await until(lambda: num_descriptors() <= most)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer with a content-length."""
    async with asyncio.timeout(PATIENCE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body


async def ask(served: Served, request: bytes) -> tuple[int, dict[str, str], Any]:
    """The answer to a request on a connection of its own, decoded."""
    reader, writer = await served.connect()
    writer.write(request)
    status, headers, body = await read_answer(reader)
    return status, headers, json.loads(body)


async def is_closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""


async def test_chunks_in_http_1_0_are_refused(served: Served) -> None:
    """A proxy of that version takes them for the next request."""
    reader, writer = await served.connect()
    lines = "Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    writer.write(f"POST {PATH} HTTP/1.0\r\n{lines}".encode())
    status, _, body = await read_answer(reader)
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_http")
    await is_closed(reader)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        ("Content-Length: 5\r\nContent-Length: 6", 400),
        ("Transfer-Encoding: gzip, chunked", 400),
        ("No colon", 400),
        ("X : 1", 400),
        ("X: " + "x" * 100_000, 431),
    ],
)
async def test_requests_that_can_be_read_in_two_ways(
    served: Served, lines: str, status: int
) -> None:
    reader, writer = await served.connect()
    writer.write(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n\r\n".encode())
    found, headers, body = await read_answer(reader)
    assert (found, headers["connection"]) == (status, "close")
    error = json.loads(body)["error"]
    assert error["code"] == "bad_http"
    assert error["type"] == "invalid_request_error"
    assert "x" * 100 not in error["message"]
    writer.write(GET)
    await is_closed(reader)


async def test_a_refused_request_for_a_head_alone(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer has no body, and so says less than it declares."""
    async with make_server({"disable_access_log": True}) as served:
        caplog.clear()
        reader, writer = await served.connect()
        writer.write(b"HEAD /version HTTP/1.1\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(b"\r\n\r\n")
        assert answer.count(b"\r\n\r\n") == 1
        assert not caplog.messages


async def test_versions_that_are_not_spoken(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_server({"disable_access_log": True}) as served:
        caplog.clear()
        await _ask_for_other_versions(served)
        assert not caplog.messages, "a client can make no line of the log"


async def _ask_for_other_versions(served: Served) -> None:
    for version in ("2.0", "3.7"):
        status, _, body = await ask(served, f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        assert (status, body["error"]["code"]) == (400, "bad_http")
    reader, writer = await served.connect()
    writer.write(GET + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")  # is only a preface when it comes first
    assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 400]


@pytest.mark.parametrize(
    "upgrade",
    [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
        "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ],
)
async def test_an_upgrade_is_ignored(served: Served, upgrade: str) -> None:
    """A proxy that lets one pass would see nothing of what follows."""
    reader, writer = await served.connect()
    for _ in range(2):
        writer.write(GET[:-2] + upgrade.encode() + b"\r\n\r\n")
        status, headers, _ = await read_answer(reader)
        assert status == 200
        assert "upgrade" not in headers
    writer.write(GET)
    assert (await read_answer(reader))[0] == 200


async def test_headers_must_arrive_in_time(make_server: MakeServer) -> None:
    async with make_server({"header_timeout_s": 0.2}) as served:
        silent, _ = await served.connect()
        slow, writer = await served.connect()
        writer.write(GET[:20])
        second, writer = await served.connect()
        writer.write(GET + GET[:20])
        assert (await read_answer(second))[0] == 200
        idle, writer = await served.connect()
        writer.write(GET)
        assert (await read_answer(idle))[0] == 200
        for reader in (slow, second):
            status, headers, body = await read_answer(reader)
            assert (status, headers["connection"]) == (408, "close")
            assert json.loads(body)["error"]["code"] == "header_timeout"
            await is_closed(reader)
        await is_closed(silent)
        writer.write(GET)  # between requests there is more time
        assert (await read_answer(idle))[0] == 200


async def test_a_byte_now_and_then_gives_no_more_time(make_server: MakeServer) -> None:
    async with make_server({"header_timeout_s": 0.3}) as served:
        reader, writer = await served.connect()

        async def drip() -> None:
            for byte in GET * 50:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        assert (await read_answer(reader))[0] == 408
        dripping.cancel()


@pytest.mark.parametrize("num_ahead_bytes", [0, 1000, MEGABYTE])
async def test_a_client_that_sent_more_requests_and_left(
    make_server: MakeServer, num_ahead_bytes: int
) -> None:
    async with make_server(step_s=0.01, max_model_len=10_000) as served:
        _, writer = await served.connect()
        writer.write(request_bytes(PATH, LONG | {"max_tokens": 9000}) + GET)
        await served.in_flight_become(1)
        writer.write(GET * (num_ahead_bytes // len(GET)))
        await writer.drain()
        writer.transport.abort()
        await served.becomes_idle()
        assert served.llm.stats.num_steps < 9000, "the answer went on after the client had left"
        text = (await served.client.get("/metrics")).text
        assert 'request_success_total{finished_reason="abort",model_name="fake"} 1.0' in text


@counts_descriptors
async def test_a_client_that_leaves_while_its_requests_are_answered(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio has a line for the log for each write to a connection that is lost."""
    async with make_server({"disable_access_log": True}) as served:
        before = num_descriptors()
        reader, writer = await served.connect()
        writer.write(GET * 1000)
        assert (await read_answer(reader))[0] == 200
        writer.transport.abort()
        await descriptors_become(before)
        assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_too_many_requests_ahead_end_the_connection_after_the_answer(
    make_server: MakeServer, held_steps: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model makes no step until more than the limit was read."""
    handle = Http1.handle

    async def noted(connection: Http1, event: Any) -> None:
        await handle(connection, event)
        if connection._bytes_ahead > MAX_AHEAD_BYTES:
            held_steps.set()

    monkeypatch.setattr(Http1, "handle", noted)
    async with make_server(step_s=3600.0) as served:
        reader, writer = await served.connect()
        writer.write(request_bytes(PATH, {"prompt": "a", "max_tokens": 30}))
        await served.in_flight_become(1)
        writer.write(GET * (MEGABYTE // len(GET)))
        status, headers, body = await read_answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["usage"]["completion_tokens"] == 30
        await is_closed(reader)


async def test_requests_ahead_within_the_limit_are_answered(make_server: MakeServer) -> None:
    async with make_server(step_s=0.01) as served:
        reader, writer = await served.connect()
        writer.write(request_bytes(PATH, {"prompt": "a", "max_tokens": 10}))
        await served.in_flight_become(1)
        for _ in range(100):
            writer.write(GET)
        for _ in range(101):
            assert (await read_answer(reader))[0] == 200


# --- answers before the end of a body -------------------------------------------------------------
@pytest.fixture
def long_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a body is read for as long as a busy machine takes to send it."""
    monkeypatch.setattr(connection_module, "_LINGER_S", PATIENCE_S)
    monkeypatch.setattr(connection_module, "_LINGER_IDLE_S", PATIENCE_S)


def send_whole_then_read(port: int, request: bytes) -> bytes:
    """Sends all and reads then, as clients without an event loop do; raises when the connection
    breaks before the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(request)
        return client.recv(65536)


@pytest.mark.parametrize(
    ("fields", "head", "status"),
    [
        ({"api_key": ("k",)}, "Content-Type: application/json", 401),
        ({}, "Content-Type: text/plain", 415),
        ({"max_body_bytes": 1000}, "Content-Type: application/json", 413),
        ({"allowed_hosts": ("a",)}, "Content-Type: application/json\r\nHost: evil.example", 403),
    ],
)
@pytest.mark.usefixtures("long_linger")
async def test_large_bodies_that_are_refused_unread(
    make_server: MakeServer, fields: dict[str, Any], head: str, status: int
) -> None:
    host = "" if "Host: " in head else "Host: localhost\r\n"
    start = f"POST {PATH} HTTP/1.1\r\n{host}{head}\r\n"
    body = b"x" * (8 * MEGABYTE)
    declared = f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body
    chunked = f"{start}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body
    async with make_server(fields) as served:
        port = int(served.url.rpartition(":")[2])
        sending = [
            asyncio.to_thread(send_whole_then_read, port, request)
            for request in (declared, chunked + b"\r\n0\r\n\r\n") * 4
        ]
        for answer in await asyncio.gather(*sending):
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert b"\r\nconnection: close\r\n" in answer.lower()


async def test_a_small_body_that_is_refused_unread_keeps_the_connection(
    make_server: MakeServer,
) -> None:
    async with make_server({"api_key": ("k",)}) as served:
        reader, writer = await served.connect()
        for size in (10, 300_000):
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
            writer.write(head.encode())
            status, headers, _ = await read_answer(reader)
            assert status == 401
            assert "connection" not in headers
            writer.write(b"x" * size)
        writer.write(GET)
        assert (await read_answer(reader))[0] == 401


async def test_a_body_that_nobody_waits_for_must_end_in_time(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("k",), "header_timeout_s": 0.2}) as served:
        reader, writer = await served.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        writer.write(head)
        assert (await read_answer(reader))[0] == 401
        await is_closed(reader)


# --- descriptors ----------------------------------------------------------------------------------
@counts_descriptors
@pytest.mark.parametrize(
    "request_",
    [b"", GET[:10], GET, b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n", GET + GET[:9]],
    ids=["nothing", "part", "whole", "404", "more"],
)
async def test_a_client_that_leaves_gives_its_descriptor_back(
    make_server: MakeServer, request_: bytes
) -> None:
    async with make_server({"api_key": ("k",)}) as served:
        before = num_descriptors()
        connections = [await served.connect() for _ in range(10)]
        for reader, writer in connections:
            writer.write(request_)
            if request_.endswith(b"\r\n\r\n"):
                await read_answer(reader)
        await until(lambda: num_descriptors() >= before + 20)  # accepted
        await served.disconnect()
        await descriptors_become(before)


@counts_descriptors
async def test_a_client_that_takes_no_answer_of_any_route(make_server: MakeServer) -> None:
    async with make_server({"send_timeout_s": 0.2}, send_bytes=8192) as served:
        before = num_descriptors()
        _, writer = await served.connect(receive_bytes=4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        await until(lambda: num_descriptors() >= before + 2)
        await descriptors_become(before + 1)


# --- TLS ------------------------------------------------------------------------------------------
@counts_descriptors
async def test_tls_connections_that_do_not_go_on(
    make_server: MakeServer, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    fields = {"ssl_certfile": cert, "ssl_keyfile": key, "header_timeout_s": 0.2}
    trust = ssl.create_default_context(cafile=cert)
    async with make_server(fields, verify=trust) as served:
        port = int(served.url.rpartition(":")[2])
        before = num_descriptors()
        for start in (b"", b"\x16\x03\x01", GET):  # of a handshake, and none at all
            reader, writer = await served.connect()
            writer.write(start)
            with suppress(ConnectionError):
                assert GET not in await asyncio.wait_for(reader.read(), PATIENCE_S)
        for protocol in (["http/1.1"], ["h2"]):
            trust.set_alpn_protocols(protocol)
            with suppress(ConnectionError):  # on a busy machine the time ends within the handshake
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
                with closing(writer):
                    await asyncio.wait_for(reader.read(), PATIENCE_S)
        await served.disconnect()
        await descriptors_become(before)
        assert (await served.client.get("/version")).status_code == 200


@pytest.mark.usefixtures("long_linger")
async def test_large_bodies_over_tls_that_are_refused_unread(
    make_server: MakeServer, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=cert)
    fields = {"ssl_certfile": cert, "ssl_keyfile": key, "api_key": ("k",)}

    def send_whole_then_read(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
            trust.wrap_socket(plain, server_hostname="127.0.0.1") as client,
        ):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            client.sendall(head % (8 * MEGABYTE) + b"x" * (8 * MEGABYTE))
            return client.recv(65536)

    async with make_server(fields, verify=trust) as served:
        port = int(served.url.rpartition(":")[2])
        answers = [asyncio.to_thread(send_whole_then_read, port) for _ in range(3)]
        for answer in await asyncio.gather(*answers):
            assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"bad header", "no valid request: illegal header line: 'bad header'"),
        (b"x: a\x00b", r"no valid request: illegal header line: 'x: a\x00b'"),
        (b": " + b"x" * 5000, "no valid request: illegal header line: ': xxx"),
    ],
)
async def test_a_line_that_is_no_header_is_quoted_as_text(
    served: Served, line: bytes, message: str
) -> None:
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n"
    status, _, body = await ask(served, request)
    assert status == 400
    assert body["error"]["message"].startswith(message)
    assert len(body["error"]["message"]) < 200
