"""Nothing that a client sends stands in the log, whatever becomes of its request."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterable

from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import DataFrame, HeadersFrame

from .conftest import MakeFake, RunningServer, wait_until

SECRET = "hush5ecret"
HEADERS = {
    "authorization": f"Bearer {SECRET}",
    "cookie": SECRET,
    "user-agent": SECRET,
    "referer": SECRET,
    "x-forwarded-for": SECRET,
    f"x-{SECRET}": SECRET,
}
BODIES: tuple[object, ...] = (
    {"prompt": SECRET, "max_tokens": 1, "user": SECRET},
    {"prompt": SECRET, "max_tokens": 1, SECRET: SECRET},
    {"prompt": SECRET, "model": SECRET},
    {"prompt": "a", "max_tokens": SECRET},
    {"prompt": "a", "max_tokens": 2, "stop": [SECRET], "bad_words": [SECRET], "stream": True},
    {"messages": [{"role": SECRET, "content": SECRET}]},
    SECRET,
)
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    f"/{SECRET}",
    f"/v1/models/{SECRET}",
    f"/health/live?key={SECRET}",
    f"/v1/completions?key={SECRET}&{SECRET}",
    f"/%0a{SECRET}",
)


def test_nothing_of_a_request_is_logged(fake_server: MakeFake) -> None:
    for flags in ((), ("--api-key", "a-key")):
        with fake_server("--log-level", "debug", *flags) as server:
            for packet in (*http1_packets(), *http2_packets()):
                say(server, packet)
            assert server.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            wait_until(lambda: not server.reader.is_alive(), 30)
        log = "".join(server.lines)
        assert "POST /v1/completions" in log, "the log is not what it was thought to be"
        for line in log.splitlines():
            assert SECRET not in line
            assert SECRET.encode().hex() not in line
        assert "Traceback" not in log


def say(server: RunningServer, packet: bytes) -> None:
    """Sends the packet, reads a little of the answer and leaves."""
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address) as client, contextlib.suppress(OSError):
        client.settimeout(0.05)
        client.sendall(packet)
        client.recv(1 << 16)


def http1_packets() -> Iterable[bytes]:
    lines = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    for path in PATHS:
        for body in BODIES[:2]:
            data = json.dumps(body)
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            yield f"{head}{lines}content-length: {len(data)}\r\n\r\n{data}".encode()
    for body in BODIES[2:]:
        data = json.dumps(body)
        for path in PATHS[:2]:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            yield f"{head}content-length: {len(data)}\r\n\r\n{data}".encode()
    yield f"GET / HTTP/1.1\r\nhost: {SECRET}\r\n\r\n".encode()
    yield f"{SECRET} /{SECRET} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    yield f"GET /{SECRET}\xe9 HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    yield f"GET {SECRET} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    yield f"{SECRET}\r\n\r\n{SECRET}".encode()
    yield f"GET / {SECRET}\r\n\r\n".encode()
    yield f"GET / HTTP/1.1\r\nhost: localhost\r\n{SECRET}\xff{SECRET}\r\n\r\n".encode("latin-1")
    yield f"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n{SECRET}".encode()  # noqa: E501
    upgrade = "upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: "
    yield f"GET /{SECRET} HTTP/1.1\r\nhost: localhost\r\n{upgrade}{SECRET}\r\n\r\n".encode()


def http2_packets() -> Iterable[bytes]:
    """Requests with prior knowledge, then first packets that are broken in several ways."""
    for path in PATHS:
        for body in BODIES:
            yield http2_request("POST", path, body)
    for method, path in (("CONNECT", f"/{SECRET}"), (SECRET, "/"), ("GET", SECRET)):
        yield http2_request(method, path, SECRET)
    yield http2_request("GET", f"/{SECRET}\xe9", SECRET)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    data = SECRET.encode()
    yield preface + data * 10
    yield preface[:-4] + data * 10
    yield preface + DataFrame(1, data).serialize()
    yield preface + b"\0\0\0\x04\0\0\0\0\0" + HeadersFrame(1, data).serialize()
    yield (
        preface + b"\0\0\0\x04\0\0\0\0\0" + HeadersFrame(1, data, flags=["END_HEADERS"]).serialize()
    )
    yield http2_request("GET", "/", SECRET) + data * 10


def http2_request(method: str, path: str, body: object) -> bytes:
    config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    connection = H2Connection(config)
    connection.initiate_connection()
    pseudo = [
        (":method", method),
        (":authority", "localhost"),
        (":scheme", "http"),
        (":path", path),
    ]
    headers = [*pseudo, ("content-type", "application/json"), *HEADERS.items()]
    connection.send_headers(1, headers)
    connection.send_data(1, json.dumps(body).encode(), end_stream=True)
    return connection.data_to_send()
