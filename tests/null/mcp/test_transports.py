"""Processes of MCP servers, at the ends that a test of whole servers cannot choose."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from vllmx_server.mcp.settings import read_servers
from vllmx_server.mcp.transports import StdioTransport

from tests.waiting import until

from .conftest import scripted


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("has_left", [False, True])
async def test_nothing_stays_of_a_transport_whose_end_is_cancelled(
    tmp_path: Path, has_left: bool, times: int
) -> None:
    """Wherever its end waits: for the process, or for its tasks."""
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"s": scripted("hangs")}}))
    (settings,) = read_servers(path, "--mcp-config")
    transport = StdioTransport(settings)
    streams = await transport.__aenter__()
    transport._has_left = has_left
    ending = asyncio.create_task(transport.__aexit__(None, None, None))
    for _ in range(times):
        await asyncio.sleep(0)
        ending.cancel()
    with suppress(asyncio.CancelledError):
        await ending
    assert transport._life == -1
    assert transport._process._transport.is_closing()  # type: ignore[attr-defined]
    await until(lambda: transport._process.returncode is not None)
    for task in transport._tasks:
        task.cancel()
    await asyncio.wait(transport._tasks)
    for stream in streams:
        stream.close()
