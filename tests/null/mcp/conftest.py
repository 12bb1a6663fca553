"""MCP servers that are started as an operator starts them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vllmx_server.mcp import server as one_server
from vllmx_server.mcp import servers, transports
from vllmx_server.mcp.offered import ToolResult
from vllmx_server.mcp.servers import ToolServers
from vllmx_server.mcp.settings import read_servers

from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
PATIENT = {"startTimeoutSeconds": PATIENCE_S, "callTimeoutSeconds": PATIENCE_S}


def scripted(mode: str, *more: str, **fields: Any) -> dict[str, Any]:
    """An entry of the file for `scripted_server.py`."""
    script = str(HERE / "scripted_server.py")
    return {"command": sys.executable, "args": ["-S", script, mode, *more], **PATIENT, **fields}


class Started:
    """Servers of a file, with answers waited for."""

    def __init__(self, path: Path) -> None:
        self.servers = ToolServers(read_servers(path, "--mcp-config"))

    def settle(self, name: str) -> str | None:
        """The fault of a server that was tried."""
        self.servers.settled(name).result(PATIENCE_S)
        return self.servers.fault(name)

    def begin(self, name: str, arguments: str = "{}") -> Future[ToolResult]:
        server = name.partition("__")[0]
        self.settle(server)
        (tool,) = [tool for tool in self.servers.tools(server) if tool.name == name]
        return self.servers.call(tool, arguments)

    def call(self, name: str, arguments: str = "{}") -> ToolResult:
        return self.begin(name, arguments).result(PATIENCE_S)


StartServers = Callable[..., Started]


@pytest.fixture
def start_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServers]:
    """`start_servers(name={entry of the file}, ...)`; all end with the test."""
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    monkeypatch.setattr(one_server, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(transports, "_LEAVE_S", 0.1)
    monkeypatch.setattr(transports, "_CODE_S", PATIENCE_S)
    monkeypatch.setattr(servers, "_CLOSE_S", PATIENCE_S)
    started: list[Started] = []

    def start(**entries: Any) -> Started:
        path = tmp_path / "mcp.json"
        entries = {name: {**PATIENT, **entry} for name, entry in entries.items()}
        path.write_text(json.dumps({"mcpServers": entries}))
        started.append(Started(path))
        return started[-1]

    yield start
    for each in started:
        each.servers.close()
