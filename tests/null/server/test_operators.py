"""The socket of operators, and what it shares with the port."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import httpx
import pytest
from vllmx_core.errors import ConfigError
from vllmx_server.config import ServerConfig
from vllmx_server.host.address import bind_operators
from vllmx_server.host.app import operators_app
from vllmx_server.host.process import OPERATORS_LIMITS
from vllmx_server.http.connections.serving import serve
from vllmx_server.http.connections.settings import AnswerConfig, Timeouts

from .conftest import MakeServer
from .test_keys import ask, key_file


def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    before = os.umask(0)
    try:
        listener = bind_operators(ServerConfig(admin_uds=str(path)))
    finally:
        os.umask(before)
    assert listener is not None
    with listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listener.listen()
        with pytest.raises(ConfigError, match="choose another --admin-uds"):
            bind_operators(ServerConfig(admin_uds=str(path)))
    again = bind_operators(ServerConfig(admin_uds=str(path)))  # left behind by one that was killed
    assert again is not None
    again.close()


def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "such.sock", tmp_path / ("a" * 200)):
        with pytest.raises(ConfigError, match="choose another --admin-uds"):
            bind_operators(ServerConfig(admin_uds=str(path)))
    for wrong in ("", "same", "./same"):
        with pytest.raises(ConfigError, match="a socket of its own"):
            ServerConfig(uds="same", admin_uds=wrong)


async def test_the_port_has_no_routes_of_operators(make_server: MakeServer) -> None:
    server = {"admin_uds": "unused", "admin_key": ("boss",), "api_key": ("user",)}
    async with make_server(server) as served:
        boss = {"authorization": "Bearer boss"}
        for path in (
            "/v1/models/load",
            "/v1/models/unload",
            "/sleep",
            "/wake",
            "/pause",
            "/shutdown",
        ):
            refused = await served.client.post(path, json={"model": "fake"}, headers=boss)
            assert refused.status_code in (404, 405), path


async def test_what_operators_see_and_do(tmp_path: Path, make_server: MakeServer) -> None:
    server = {"admin_uds": "unused", "api_keys_file": key_file(tmp_path, ann={})}
    async with make_server(server) as served:
        assert (await ask(served, "ann")).status_code == 200
        await served.becomes_idle()
        transport = httpx.ASGITransport(operators_app(served.server))
        async with httpx.AsyncClient(transport=transport, base_url="http://vllmx") as operator:
            rows = (await operator.get("/v1/usage")).json()["data"]
            assert {row["key"]: row["requests"] for row in rows}["ann"] == 1
            reset = await operator.post("/reset_prefix_cache")
            assert reset.json() == {"reset": {"fake": True}}
            assert "vllmx:" in (await operator.get("/metrics")).text
            missing = await operator.post("/v1/chat/completions", json={})
            assert missing.json()["error"]["code"] == "not_found"
            assert "x-request-id" in missing.headers


async def test_it_answers_while_the_port_is_full(tmp_path: Path, make_server: MakeServer) -> None:
    path = tmp_path / "admin.sock"
    async with make_server({"max_connections": 1, "max_connections_per_address": 1}) as served:
        _, writer = await served.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        listener = bind_operators(ServerConfig(admin_uds=str(path)))
        assert isinstance(listener, socket.socket)
        listener.listen()
        stop = asyncio.Event()
        app = operators_app(served.server)
        serving = asyncio.ensure_future(
            serve(app, AnswerConfig(), listener, OPERATORS_LIMITS, Timeouts(15, 15), stop)
        )
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://vllmx") as operator:
            assert (await operator.get("/health")).status_code == 200
        stop.set()
        await serving
        listener.close()


async def test_a_paused_core_holds_what_comes(make_server: MakeServer) -> None:
    async with make_server({"admin_key": ("boss",)}, step_s=0.005) as served:
        boss = {"authorization": "Bearer boss"}

        async def operator(path: str, method: str = "POST") -> dict[str, object]:
            found = await served.client.request(method, path, headers=boss)
            assert found.status_code == 200, found.text
            return dict(found.json())

        async def text(**body: object) -> tuple[str, str]:
            found = await served.post("/v1/completions", prompt="hi", seed=1, **body)
            choice = found.json()["choices"][0]
            return choice["text"], choice["finish_reason"]

        expected = await text(max_tokens=50)
        for mode in ("keep", "wait", "abort"):
            running = asyncio.create_task(text(max_tokens=50 if mode != "abort" else 500))
            await served.in_flight_become(1)
            assert await operator(f"/pause?mode={mode}") == {"is_paused": True}
            assert await operator("/is_paused", "GET") == {"is_paused": True}
            later = asyncio.create_task(text(max_tokens=50))
            await asyncio.sleep(0.05)
            assert not later.done()
            assert running.done() == (mode != "keep")
            assert await operator("/resume") == {"is_paused": False}
            assert await later == expected
            assert (await running)[1] == ("abort" if mode == "abort" else "length")
        refused = await served.client.post("/pause?mode=now", headers=boss)
        assert refused.status_code == 400
        assert "abort, wait or keep" in refused.text
