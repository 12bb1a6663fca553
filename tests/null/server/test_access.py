"""Access to the server: API keys, CORS, path prefixes, TLS and HTTP/2."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import ConfigError
from vllmx_server.config import ServerConfig
from vllmx_server.host import address
from vllmx_server.host.address import bind, listen, passed_by_systemd, url_of
from vllmx_server.host.apis import all_routes
from vllmx_server.host.app import build_app
from vllmx_server.host.process import hypercorn_config
from vllmx_server.http.operation import Operation
from vllmx_server.http.route import Right, Route

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served

RIGHTS = {(route.method, route.path): route.right for route in all_routes()}
ROUTES = [path for _, path in RIGHTS if path != "/" and not path.startswith("/web/")]

KEYS = {"api_key": ("first", "zweitër")}
PUBLIC = ("/ping", "/health", "/health/live", "/health/ready", "/docs")


async def test_a_key_is_wanted_on_every_route_but_public_ones(make_server: MakeServer) -> None:
    async with make_server(KEYS) as served:
        for path in (*ROUTES, "/nothing", "/health/../metrics"):
            for method in ("GET", "POST", "OPTIONS", "DELETE"):
                response = await served.client.request(method, path)
                if path in PUBLIC:
                    assert response.status_code in (200, 405)
                else:
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert response.json()["error"]["type"] == "authentication_error"
        for key in ("firs", "first2", "Bearer first"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await served.client.get("/version", headers=headers)).status_code == 401
        for key in ("first", "zweitër"):
            headers = {"authorization": f"bearer {key}".encode()}
            assert (await served.client.get("/version", headers=headers)).status_code == 200
            assert (await served.client.get("/nothing", headers=headers)).status_code == 404


def test_every_route_has_a_right() -> None:
    async def planted(request: Request) -> Response:
        return Response("open")

    with pytest.raises(TypeError, match="right"):
        Route("GET", "/planted", planted, Operation("Planted"))  # type: ignore[call-arg]


async def test_rights_are_what_is_listed(make_server: MakeServer) -> None:
    """401 and 403 are of rights here: no body of these requests is one that a route takes."""
    headers = [{}, {"authorization": "Bearer first"}, {"authorization": "Bearer top"}]
    first_that_may = {Right.EVERYBODY: 0, Right.HOLDERS: 1, Right.OPERATORS: 2}
    flags = {"admin_key": ("top",), "enable_tokenizer_info_endpoint": True}
    async with make_server({**KEYS, **flags}) as served:
        for (method, path), right in RIGHTS.items():
            if path == "/shutdown":
                continue  # the operator's key would end this process
            path = re.sub(r"{\w+(:path)?}", "page.js", path)
            for rank, sent in enumerate(headers):
                response = await served.client.request(method, path, headers=sent)
                refused = response.status_code in (401, 403)
                assert refused == (rank < first_that_may[right]), (method, path, sent)
                if refused:
                    assert response.status_code == (403 if sent else 401), (method, path, sent)


async def test_prefixes_are_shared_within_a_key_alone(make_server: MakeServer) -> None:
    async with make_server(KEYS) as served:

        async def cached(key: str, **fields: str) -> int:
            response = await served.client.post(
                "/v1/completions",
                json={"prompt": "x" * 64, "max_tokens": 1, **fields},
                headers={"authorization": f"Bearer {key}".encode()},
            )
            found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert await cached("first") == 0
        assert await cached("first") > 0
        assert await cached("zweitër") == 0, "another client could see what was asked before"
        assert await cached("first", cache_salt="mine") == 0
        assert await cached("first", cache_salt="mine") > 0


async def test_cors(make_server: MakeServer) -> None:
    async with make_server({**KEYS, "allowed_origins": ("http://a.example",)}) as served:
        asks = {"origin": "http://a.example", "access-control-request-method": "POST"}
        asks["access-control-request-headers"] = "authorization,content-type"
        response = await served.client.options("/v1/completions", headers=asks)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://a.example"
        for path, status in (("/version", 401), ("/health", 200)):
            response = await served.client.get(path, headers={"origin": "http://a.example"})
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == "http://a.example"
        response = await served.client.get("/health", headers={"origin": "http://b.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_no_cors_unless_asked_for(make_server: MakeServer) -> None:
    async with make_server() as served:
        response = await served.client.get("/health", headers={"origin": "http://a.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_a_path_prefix(make_server: MakeServer) -> None:
    async with make_server({**KEYS, "root_path": "/llm"}) as served:
        assert (await served.client.get("/llm/health")).status_code == 200
        assert (await served.client.get("/llm/version")).status_code == 401
        headers = {"authorization": "Bearer first"}
        assert (await served.client.get("/llm/version", headers=headers)).status_code == 200


async def test_tls_and_http2(make_server: MakeServer, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=cert)
    flags = {"ssl_certfile": cert, "ssl_keyfile": key, "max_body_bytes": 2000}
    async with make_server(flags, verify=trust, step_s=0.01) as served:
        assert served.url.startswith("https://")
        assert (await served.complete(max_tokens=3))["usage"]["completion_tokens"] == 3
        async with httpx.AsyncClient(
            base_url=served.url, http2=True, verify=trust, timeout=PATIENCE_S
        ) as client:

            async def stream(count: int) -> None:
                """Every token arrives, and the end; a busy machine puts several in one event."""
                body = {"prompt": "a", "max_tokens": count, "stream": True}
                body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
                response = await client.post("/v1/completions", json=body)
                assert response.http_version == "HTTP/2"
                *events, done = response.text.strip().split("\n\n")
                assert done == "data: [DONE]"
                usage = json.loads(events[-1].removeprefix("data: "))["usage"]
                assert usage["completion_tokens"] == count

            await asyncio.gather(*(stream(count) for count in (5, 10, 20)))
            # An answer before the end of the body must not end the other streams of the connection.
            long = asyncio.ensure_future(stream(60))
            await served.in_flight_become(1)
            refused = await client.post(
                "/v1/completions",
                content=b" " * 300_000,
                headers={"content-type": "application/json"},
            )
            assert refused.status_code == 413
            await long
            body = {"prompt": "a", "max_tokens": 400, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    break
            await served.becomes_idle()
            await stream(3)


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nothing")
    for path in (tmp_path / "bad.pem", tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match="PEM"):
            hypercorn_config(ServerConfig(ssl_certfile=str(path), ssl_keyfile=str(path)))


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"max_body_bytes": 0},
        {"drain_timeout_s": float("nan")},
        {"ssl_certfile": "x"},
        {"api_key": ("",)},
        {"api_key": ("good", "from a file\n")},
        {"admin_key": ("a\0b",)},
        {"log_level": "loud"},
        {"root_path": "llm/"},
    ],
)
def test_settings_that_cannot_be_used(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ServerConfig(**fields)  # type: ignore[arg-type]


def test_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    first, url = bind(ServerConfig(port=0))
    with first:
        listen(first, ServerConfig(port=0))
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*another --port"):
            bind(ServerConfig(port=port))
    for fields in ({"host": "no.such.host.invalid"}, {"host": "203.0.113.1"}):
        with pytest.raises(ConfigError, match=r"cannot listen .*--host must be an address"):
            bind(ServerConfig(port=0, **fields))
    for path in (tmp_path / "missing" / "x.sock", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="--uds"):
            bind(ServerConfig(uds=str(path)))


@pytest.mark.parametrize("where", ["127.0.0.1", "unix", "many", "another process", "datagrams"])
def test_sockets_of_systemd(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_UNIX if where == "unix" else socket.AF_INET
    kind = socket.SOCK_DGRAM if where == "datagrams" else socket.SOCK_STREAM
    path, config = str(tmp_path / "passed.sock"), ServerConfig(host="0.0.0.0", port=9)
    with socket.socket(family, kind) as given:
        given.bind(path if where == "unix" else ("127.0.0.1", 0))
        if where != "datagrams":
            given.listen()
        monkeypatch.setattr(address, "_FIRST_PASSED", os.dup(given.fileno()))
        monkeypatch.setenv("LISTEN_FDS", "2" if where == "many" else "1")
        monkeypatch.setenv("LISTEN_PID", str(os.getpid() + (where == "another process")))
        if where in ("many", "datagrams"):
            with pytest.raises(ConfigError, match="one ListenStream="):
                passed_by_systemd(config)
            return
        listener, found = passed_by_systemd(config)
        assert "LISTEN_FDS" not in os.environ
        if listener is None:
            assert (where, found) == ("another process", config)
            return
        with listener:
            assert not listener.get_inheritable()
            port = None if where == "unix" else given.getsockname()[1]
            url = f"unix:{path}" if where == "unix" else f"http://127.0.0.1:{port}"
            assert url_of(listener, found) == url


def test_unix_sockets(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    server = ServerConfig(uds=str(path))
    first, url = bind(server)
    assert url == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o600
    with first:
        listen(first, server)
        with pytest.raises(ConfigError, match="in use"):
            bind(server)
    second, _ = bind(server)  # what a killed server left behind is no hindrance
    second.close()


def test_a_unix_socket_whose_queue_is_full_is_in_use(tmp_path: Path) -> None:
    """Whoever asks neither waits for its server nor takes its place."""
    path = str(tmp_path / "server.sock")
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(path)
        busy.listen(0)
        client = busy
        while client is busy or not client.connect_ex(path):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
        with pytest.raises(ConfigError, match="in use"):
            bind(ServerConfig(uds=path))


async def test_a_websocket_is_denied(served: Served) -> None:
    """Nothing here offers one; another ASGI server would."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": [], "root_path": ""}
    await build_app(served.llm, ServerConfig(api_key=("k",)))(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
