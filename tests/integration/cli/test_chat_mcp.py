"""`vllmx chat --mcp` with the real model and a server by the official package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

SERVER = Path(__file__).parents[2] / "null" / "mcp" / "real_server.py"


def chat(path: Path, said: str) -> subprocess.CompletedProcess[str]:
    return forked.run("chat", "--temperature", "0", "--mcp", str(path), stdin=said)


def test_a_tool_is_called_and_its_result_is_read(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    path = tmp_path / "mcp.json"
    entry = {
        "command": sys.executable,
        "args": [str(SERVER), "stdio"],
        "allowedTools": ["get_weather"],
        "startTimeoutSeconds": 600,
    }
    path.write_text(json.dumps({"mcpServers": {"weather": entry}}))
    asked = "What is the weather in Paris?\n"
    done = chat(path, f"{asked}/undo\n/show\n/tools\n/tools off\n{asked}/tools maybe\n")
    assert done.returncode == 0, done.stderr
    assert "weather__get_weather  " in done.stdout
    assert "/tools off keeps them from the model" in done.stdout
    assert done.stdout.count('{"city": "Paris"}') == 1  # not called while they are off
    assert "say /tools, /tools on or /tools off, not 'maybe'" in done.stdout
    assert '{"city": "Paris"}' in done.stdout
    result = '< { "temperature": 21, "sky": "sunny" }'
    assert result in done.stdout
    answer = done.stdout.rpartition(result)[2]
    assert "21" in answer
    assert "Taken back." in answer
    assert "tool:" not in answer


def test_a_wrong_file_is_said_before_the_model_loads(tmp_path: Path) -> None:
    done = chat(tmp_path / "none.json", "")
    assert done.returncode == 2
    assert "--mcp" in done.stderr
    assert "Traceback" not in done.stderr
