"""Tools of an MCP server in Responses: the real model, two API processes, the official client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.waiting import wait_until

from .conftest import running_server

SERVER = Path(__file__).parents[2] / "null" / "mcp" / "scripted_server.py"
ASK: Any = {
    "model": "demo",
    "temperature": 0,
    "input": "What is the weather in Paris?",
    "tools": [{"type": "mcp", "server_label": "weather", "require_approval": "never"}],
}


def servers_of(path: Path) -> list[int]:
    """Processes that run the script with this argument."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            pass
    return found


def test_the_model_calls_a_tool_and_reads_what_it_returns(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    path, mark = tmp_path / "mcp.json", tmp_path / "mark"
    entry = {"command": sys.executable, "args": ["-S", str(SERVER), "weather", str(mark)],
             "startTimeoutSeconds": 600, "callTimeoutSeconds": 600}  # fmt: skip
    path.write_text(json.dumps({"mcpServers": {"weather": entry}}))
    flags = ("--max-num-seqs", "8", "--api-workers", "2", "--mcp-config", str(path))
    with running_server(*flags) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(**ASK)
            assert [item.type for item in whole.output] == ["mcp_list_tools", "mcp_call", "message"]
            called: Any = whole.output[1]
            assert json.loads(called.arguments) == {"city": "Paris"}
            assert json.loads(called.output)["temperature"] == 21
            assert "21" in whole.output_text
            events = list(client.responses.create(**ASK, stream=True))
            types = [event.type for event in events]
            for kind in ("mcp_list_tools.completed", "mcp_call.in_progress", "mcp_call.completed"):
                assert f"response.{kind}" in types
            last: Any = events[-1]
            assert last.type == "response.completed"
            assert last.response.output_text == whole.output_text
        has_processes = Path("/proc/self/cmdline").exists()
        if has_processes:  # a guard and a server for each
            wait_until(lambda: len(servers_of(mark)) == 4)
    assert not has_processes or wait_until(lambda: not servers_of(mark)) is None
    assert "Paris" not in "".join(server.lines)
