"""MCP servers over streamable HTTP: the official one, and one that answers badly."""

from __future__ import annotations

import gzip
import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from vllmx_server.mcp import server as one_server

from tests.waiting import PATIENCE_S, wait_until

from .conftest import HERE, StartServers

TOOLS = ("echo", "large", "packed", "hang", "redirect", "events", "page", "broken")


class Handler(BaseHTTPRequestHandler):
    """Answers JSON; one tool for each way to answer badly."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[dict[str, str]]] = []
    leaving: ClassVar[threading.Event] = threading.Event()

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.put(405, b"", "text/plain")

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        message = json.loads(self.rfile.read(size))
        self.seen.append(dict(self.headers))
        if "id" not in message:
            self.put(202, b"", "text/plain")
            return
        method, params = message["method"], message.get("params", {})
        head = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "initialize":
            result = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "bad", "version": "1"},
            }
        elif method == "tools/list":
            result = {"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in TOOLS]}
        elif method == "ping":
            result = {}
        elif method == "tools/call":
            result = self.call(params["name"], head)
        else:
            error = {"code": -32601, "message": "not known"}
            self.put(200, json.dumps({**head, "error": error}).encode())
            return
        if result is not None:
            self.put(200, json.dumps({**head, "result": result}).encode())

    def call(self, name: str, head: dict[str, Any]) -> dict[str, Any] | None:
        text = "fine"
        if name == "large":
            text = "x" * (5 << 20)
        result = {"content": [{"type": "text", "text": text}]}
        data = json.dumps({**head, "result": result}).encode()
        if name == "packed":
            self.put(200, gzip.compress(data), **{"content-encoding": "gzip"})
        elif name == "redirect":
            self.put(307, b"", location="http://127.0.0.2:1/mcp")
        elif name == "events":
            self.put(200, b"data: " + b"x" * (5 << 20), "text/event-stream")
        elif name == "page":
            self.put(200, b"<html>", "text/html")
        elif name == "broken":
            self.put(500, b"{", "application/json")
        elif name == "hang":
            self.leaving.wait(PATIENCE_S)
        else:
            return result
        return None

    def put(self, status: int, data: bytes, kind: str = "application/json", **more: str) -> None:
        try:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            for name, value in more.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # who asked has had enough


@pytest.fixture
def bad_server() -> Iterator[str]:
    Handler.seen, Handler.leaving = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    Handler.leaving.set()
    server.shutdown()
    serving.join()
    server.server_close()


def test_bad_answers_are_errors_of_their_calls(
    start_servers: StartServers, bad_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_server, "_PING_S", 0.5)
    headers = {"Authorization": "Bearer k1"}
    started = start_servers(
        s={"url": bad_server, "headers": headers, "callTimeoutSeconds": 1, "type": "http"}
    )
    assert started.settle("s") is None
    assert len(started.servers.tools("s")) == len(TOOLS)
    tools = {tool.tool: tool for tool in started.servers.tools("s")}
    wait_until(lambda: started.servers.call(tools["echo"], "{}").result(PATIENCE_S).text == "fine")
    for name in TOOLS[1:]:
        wait_until(lambda: started.servers.fault("s") is None)
        result = started.servers.call(tools[name], "{}").result(PATIENCE_S)
        assert result.is_error, name
        assert len(result.text) < 600
    wait_until(lambda: started.servers.call(tools["echo"], "{}").result(PATIENCE_S).text == "fine")
    assert all(head.get("Authorization") == "Bearer k1" for head in Handler.seen)


def test_a_server_that_is_not_there(start_servers: StartServers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        started = start_servers(s={"url": f"http://127.0.0.1:{taken.getsockname()[1]}/mcp"})
        assert started.settle("s") == "it cannot be reached (ConnectError)"


def test_the_official_server_over_http(start_servers: StartServers) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="comes with the package mcp")
    spec = importlib.util.spec_from_file_location("real_server", HERE / "real_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    # uvicorn listens only once its thread has started; a call before that would be refused.
    listener.listen()
    config = uvicorn.Config(module.server.streamable_http_app(), log_config=None, ws="none")
    server = uvicorn.Server(config)
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    serving.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        started = start_servers(real={"url": url})
        assert started.settle("real") is None
        assert [tool.tool for tool in started.servers.tools("real")] == ["get_weather", "add"]
        assert started.call("real__add", '{"a": 2, "b": 3}').text == "5"
        assert started.call("real__add", '{"a": "x"}').is_error
        started.servers.close()
    finally:
        server.should_exit = True
        serving.join()
        listener.close()
