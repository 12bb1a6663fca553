"""The whole HTTP stack in the test's own event loop, over the fake model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import Registry
from vllmx_engine.async_llm import AsyncLLM
from vllmx_server.config import ServerConfig
from vllmx_server.generating import served as model
from vllmx_server.host.address import bind, listen
from vllmx_server.host.app import build_app
from vllmx_server.host.process import connection_limits, hypercorn_config
from vllmx_server.host.server import Server
from vllmx_server.http.connections import serving
from vllmx_server.http.connections.settings import Timeouts
from vllmx_testing.fake_checkpoint import FakePlugin, make_fake_checkpoint

from tests.waiting import PATIENCE_S, until

JSON = {"content-type": "application/json"}


@dataclass
class Served:
    """A server that runs in this process, and a client for it."""

    url: str
    llm: AsyncLLM
    server: Server
    state: model.Served
    client: httpx.AsyncClient
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body_for(path, body))

    async def complete(self, prompt: str | list[str] = "ab", **body: Any) -> dict[str, Any]:
        """The answer of a text completion that must succeed."""
        response = await self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The decoded events of a streamed answer, "[DONE]" included."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    async def connect(
        self, receive_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of one's own, with a small buffer in the kernel when that is wanted; closed
        with the server."""
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 26)
        self.writers.append(writer)
        return reader, writer

    async def disconnect(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def metrics(self) -> dict[str, float]:
        """Sum over the labels of each metric that is not a bucket."""
        found: dict[str, float] = {}
        for line in (await self.client.get("/metrics")).text.splitlines():
            if not line.startswith("#") and "_bucket{" not in line:
                name = line.partition("{")[0].partition(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    async def in_flight_become(self, count: int) -> None:
        """Waits until this many answers are being made."""
        await until(lambda: self.state.admission.in_flight == count)

    async def becomes_idle(self) -> None:
        """Waits until nothing is in flight and the core says that no block is held."""
        await until(lambda: not (self.state.admission.in_flight or self.llm.num_in_flight))
        async with asyncio.timeout(PATIENCE_S):
            while not await self.llm.reset_prefix_cache():
                await asyncio.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The events of a body, with or without its chunks' sizes."""
    lines = re.findall(r"data: (.*)\n\n", text)
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def body_for(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The fake model may draw its end of sequence at any time, so it is ignored."""
    return {"ignore_eos": True, **body} if path.endswith("completions") else body


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A whole HTTP/1.1 request, for tests that hold the socket themselves."""
    return request_with(path, json.dumps(body_for(path, body)).encode())


def request_with(path: str, payload: bytes) -> bytes:
    """The same with this body."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    ).encode() + payload


MakeServer = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    """`async with make_server({fields of ServerConfig}, {of EngineConfig}, **of_the_model)`.
    `verify` is the client's: without TLS it reads no list of authorities, which would take longer
    than the server takes to start."""

    @asynccontextmanager
    async def make(
        server: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        *,
        verify: Any = False,
        send_bytes: int | None = None,
        **fake: Any,
    ) -> AsyncIterator[Served]:
        settings = {"vocab_size": 259, "eos_id": None, "max_model_len": 512} | fake
        folder = str(make_fake_checkpoint(tmp_path / "model", **settings))
        registry = Registry()
        registry.add(FakePlugin, "test:fake")
        # With a seed a test draws the same tokens each time: some would end an answer.
        own_engine = {"seed": 0} | (engine or {})
        config = EngineConfig(model=folder, backend="fake", served_model_name="fake", **own_engine)
        own = ServerConfig(port=0, **(server or {}))
        listener, url = bind(own)
        async with await AsyncLLM.start(config, registry=registry, in_process=True) as llm:
            app = build_app(llm, own)
            process: Server = app.state.server
            if send_bytes is not None:  # what the kernel holds for a client that does not read
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
            await process.start()
            listen(listener, own)
            stop = asyncio.Event()
            running = asyncio.ensure_future(
                serving.serve(
                    app,
                    hypercorn_config(own),
                    listener,
                    connection_limits(own),
                    Timeouts(own.header_timeout_s, own.send_timeout_s),
                    stop,
                )
            )
            try:
                client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=verify)
                async with client:
                    served = Served(url, llm, process, process.served, client)
                    try:
                        yield served
                    finally:
                        await served.disconnect()
            finally:
                stop.set()
                await running
                await process.stop()
                process.close()
                process.served.storage.close()
                listener.close()

    return make


@pytest.fixture
def held_steps(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps of the fake model that take any time at all end when this is set."""
    go_on = threading.Event()
    held = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: go_on.wait())
    monkeypatch.setattr("vllmx_testing.fake.time", held)
    return go_on


@pytest.fixture
async def paced_steps(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A step of the fake model that takes any time at all ends when the event loop has seen to what
    the one before came to, however slow the machine is."""
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(_: float) -> None:
        begun.release()
        go_on.acquire()

    async def pace() -> None:
        while True:
            await asyncio.sleep(0.001)
            if begun.acquire(blocking=False):
                for _ in range(100):
                    await asyncio.sleep(0)
                go_on.release()

    paced = SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)
    monkeypatch.setattr("vllmx_testing.fake.time", paced)
    pacing = asyncio.ensure_future(pace())
    yield
    pacing.cancel()


@pytest.fixture
async def served(make_server: MakeServer) -> AsyncIterator[Served]:
    async with make_server() as running:
        yield running


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl, which is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-keyout", key, "-out", cert, "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
