"""What stands in every answer, whoever gives it, and what stands in none."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

import httpx
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived
from vllmx_core.errors import ConfigError
from vllmx_server.apis.chat import routes as chat
from vllmx_server.apis.status import routes as status
from vllmx_server.config import ServerConfig

from .conftest import MakeServer, Served

SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
ORIGIN = "http://a.example"


def check(headers: httpx.Headers) -> None:
    for name, value in SAFE.items():
        assert headers.get_list(name) == [value]


async def raw_headers(reader: asyncio.StreamReader) -> tuple[int, httpx.Headers]:
    """Status and headers of the answer to bytes that no client would send."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = [line.partition(": ")[::2] for line in head[1:] if line]
    return int(head[0].split()[1]), httpx.Headers(pairs)


async def test_every_answer_says_how_it_may_be_read(make_server: MakeServer) -> None:
    flags = {"api_key": ("a",), "allowed_origins": (ORIGIN,), "max_body_bytes": 2000}
    async with make_server(flags) as served:
        ask = {"authorization": "Bearer a", "content-type": "application/json"}
        preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
        chat_body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
        text_body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True})
        for method, path, headers, body, expected in (
            ("GET", "/health", {}, "", 200),
            ("GET", "/version", {}, "", 401),
            ("GET", "/version", ask, "", 200),
            ("GET", "/", {}, "", 200),
            ("GET", "/docs", {}, "", 200),
            ("GET", "/nothing", ask, "", 404),
            ("DELETE", "/version", ask, "", 405),
            ("OPTIONS", "/version", preflight, "", 200),
            ("GET", "/version", {**ask, "host": "b.example"}, "", 403),
            ("POST", "/v1/completions", ask, "{", 400),
            ("POST", "/v1/completions", ask, " " * 3000, 413),
            ("POST", "/v1/chat/completions", ask, chat_body, 200),
            ("POST", "/v1/completions", ask, text_body, 200),
        ):
            response = await served.client.request(method, path, headers=headers, content=body)
            assert response.status_code == expected, path
            check(response.headers)
            assert "strict-transport-security" not in response.headers


async def test_also_what_is_no_request_or_finds_no_place(make_server: MakeServer) -> None:
    async with make_server({"max_connections_per_address": 1}) as served:
        first, writer = await served.connect()
        second, _ = await served.connect()
        code, headers = await raw_headers(second)
        assert code == 503
        check(headers)
        writer.write(b"no request\r\n\r\n")
        code, headers = await raw_headers(first)
        assert code == 400
        check(headers)


async def test_also_what_http2_refuses(served: Served) -> None:
    reader, writer = await served.connect()
    client = H2Connection(H2Configuration())
    client.initiate_connection()
    client.send_headers(1, [(":method", "CONNECT"), (":authority", "a")], end_stream=True)
    writer.write(client.data_to_send())
    found: list[ResponseReceived] = []
    while not found:
        events = client.receive_data(await reader.read(1 << 16))
        found = [event for event in events if isinstance(event, ResponseReceived)]
    check(httpx.Headers(found[0].headers))


async def test_tls_alone_where_it_is_asked_for(
    make_server: MakeServer, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=cert)
    flags = {"ssl_certfile": cert, "ssl_keyfile": key}
    for seconds in (0, 31_536_000):
        asked = {**flags, "hsts_max_age_s": seconds}
        async with make_server(asked, verify=trust) as served:
            for path in ("/health", "/nothing"):
                headers = (await served.client.get(path)).headers
                expected = f"max-age={seconds}" if seconds else None
                assert headers.get("strict-transport-security") == expected
                check(headers)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ServerConfig(hsts_max_age_s=1)


def _planted(*_: Any, **__: Any) -> Any:
    try:
        raise KeyError("planted cause")
    except KeyError as error:
        raise RuntimeError("planted detail") from error


def check_tells_nothing(body: str) -> None:
    for word in ("planted", "RuntimeError", "KeyError", "Traceback", "line ", ".py"):
        assert word not in body, body
    assert "internal error" in body


async def test_a_planted_bug_is_an_answer_without_its_traceback(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "a"}]
    async with make_server(step_s=0.01) as served:
        with monkeypatch.context() as planting:
            planting.setattr(status, "_json", _planted)
            response = await served.client.get("/version")
            assert response.status_code == 500
            check_tells_nothing(response.text)
            check(response.headers)
        with monkeypatch.context() as planting:
            planting.setattr("vllmx_server.apis.chat.routes.submit_chat", _planted)
            for path, more in (
                ("/v1/chat/completions", {"stream": True}),
                ("/v1/chat/completions", {}),
            ):
                response = await served.client.post(path, json={"messages": messages, **more})
                assert response.status_code == 500
                check_tells_nothing(response.text)
        with monkeypatch.context() as planting:  # when the answer has begun
            planting.setattr(chat.ChatAnswer, "_delta", _planted)
            body = {"messages": messages, "stream": True, "max_tokens": 4, "ignore_eos": True}
            response = await served.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            check_tells_nothing(response.text)
        with monkeypatch.context() as planting:  # in what answers errors
            planting.setattr("vllmx_server.errors.cut_message", _planted)
            response = await served.client.get("/v1/models/other")
            assert response.status_code == 500
            assert "planted" not in response.text
            assert "Traceback" not in response.text
        await served.becomes_idle()
