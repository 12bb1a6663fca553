"""The programs that pages show run as they stand, against a real server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from .conftest import RunningServer, running_server

DOCS = Path(__file__).parents[3] / "docs"


def programs(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_programs_run(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of routes.md go on with the client that serving.md makes."""
    monkeypatch.chdir(tmp_path)  # where the batch writes its in.jsonl
    (openai_chat,) = programs("serving.md")
    messages, responses, conversations, batches, of_messages = programs("routes.md")
    names: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for program, variables in (
        (messages, own),
        (openai_chat, names),
        (responses, names),
        (conversations, names),
        (batches, names),
        (of_messages, own),
    ):
        exec(program.replace("http://127.0.0.1:8000", server.url), variables)
    for variables in (own, names):
        variables["client"].close()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(printed)
    assert names["second"].previous_response_id == names["first"].id
    assert names["batch"].status in ("validating", "in_progress", "finalizing", "completed")


def test_the_readmes_client(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    _, client = programs("../README.md")
    names: dict[str, Any] = {}
    exec(client.replace("http://127.0.0.1:8000", server.url), names)
    names["client"].close()
    assert capsys.readouterr().out


def test_a_server_of_tools_and_who_asks_for_it(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    weather, ask = programs("mcp.md")
    (tmp_path / "weather.py").write_text(weather)
    text = (DOCS / "mcp.md").read_text(encoding="utf-8")
    (servers,) = re.findall(r"```json\n(\{\"mcpServers\".*weather\.py.*)\n```", text)
    config = json.loads(servers)
    config["mcpServers"]["weather"] = {
        "command": sys.executable,
        "args": [str(tmp_path / argument) for argument in config["mcpServers"]["weather"]["args"]],
        "startTimeoutSeconds": 600,
    }
    (tmp_path / "mcp.json").write_text(json.dumps(config))
    with (
        running_server("--mcp-config", str(tmp_path / "mcp.json")) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        names = {"client": client}
        exec(ask.replace("Qwen/Qwen3-4B", "demo"), names)
        answer: Any = names["answer"]
    assert [tool.name for tool in answer.output[0].tools] == ["get_weather"]
