"""Nothing that a client sends stands in the log, whatever becomes of its request."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import DataFrame, HeadersFrame
from vllmx_testing.fake_checkpoint import make_fake_checkpoint

from tests.waiting import PATIENCE_S, wait_until

from .conftest import MakeFake, RunningServer

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
TALK = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
SOUND = {
    "/v1/chat/completions": TALK,
    "/v1/messages": TALK,
    "/v1/responses": {"input": SECRET, "max_output_tokens": 2},
    "/tokenize": {"prompt": SECRET},
}
"""What is answered, by its path."""
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


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, str]:
    """The flag of a model that knows all bytes."""
    return "--model", str(make_fake_checkpoint(tmp_path / "model", vocab_size=259, eos_id=None))


def test_nothing_of_a_request_is_logged(fake_server: MakeFake, model: tuple[str, str]) -> None:
    for flags in (model, (*model, "--api-key", "a-key")):
        with fake_server("--log-level", "debug", *flags) as server:
            for packet in (*http1_packets(), *http2_packets()):
                say(server, packet)
            key = {"x-api-key": "a-key"}
            for path, body in SOUND.items():
                assert server.post(path, body, headers=key).status_code == 200
            assert server.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE_S) == 0
            wait_until(lambda: not server.reader.is_alive())
        log = "".join(server.lines)
        assert "POST /v1/completions" in log, "the log is not what it was thought to be"
        ids = ", ".join(str(byte) for byte in SECRET.encode()[:4])
        for line in log.splitlines():
            for part in (SECRET[:5], SECRET[-5:], SECRET.encode().hex(), ids):
                assert part not in line
        assert "Traceback" not in log


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_prompts_are_logged_where_an_operator_asks(
    fake_server: MakeFake, model: tuple[str, str], log_format: str
) -> None:
    prompt = 'tell\nrequest 9.9 (forged): \u2028me "this" \x1b[31m' + "x" * 300
    asked: tuple[tuple[str, dict[str, object]], ...] = (
        ("/v1/completions", {"prompt": prompt, "max_tokens": 3, "user": SECRET}),
        ("/v1/completions", {"prompt": list(prompt[:90].encode()), "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": prompt}]}),
        ("/v1/responses", {"input": prompt}),
    )
    flags = ("--enable-log-requests", "--max-log-len", "100", "--log-format", log_format)
    flags += (*model, "--api-key", SECRET)
    with fake_server(*flags, "--log-level", "debug") as server:
        for number, (path, body) in enumerate(asked):
            limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 3}
            headers = {**HEADERS, "x-request-id": f"mine-{number}"}
            answer = server.post(path, limit | body, headers=headers)
            assert answer.status_code == 200, answer.text
        wait_until(lambda: sum("prompt tokens" in line for line in server.lines) == len(asked))
    lines = [line.rstrip("\n") for line in server.lines if "prompt tokens" in line]
    if log_format == "json":
        assert all(isinstance(json.loads(line), dict) for line in server.lines)
        records = [json.loads(line) for line in lines]
        assert {record["logger"] for record in records} == {"vllmx.prompts"}
        lines = [record["message"] for record in records]
    for number, line in enumerate(lines):
        assert f"(mine-{number}): " in line
        assert "tell\\nrequest 9.9" in line
        assert len(line) < 400
    assert "max_tokens=3" in lines[0]
    assert lines[0].endswith("x' ...")
    log = "".join(server.lines)
    assert log.count("request 9.9") == len(asked), "a prompt stands there once"
    assert "\u2028" not in log
    assert "\x1b" not in log
    assert SECRET not in log
    assert "this log will hold what clients ask" in log


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
