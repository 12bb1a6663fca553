"""The Python blocks of docs/tutorial.md, in one program as a reader pastes them, against the demo
model: each prints what the page shows behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import RunningServer

PAGE = (Path(__file__).parents[3] / "docs" / "tutorial.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def is_shown(printed: str, shown: str) -> bool:
    """True if the page shows what was printed; `...` on the page leaves out any text."""
    pattern = ".*".join(map(re.escape, shown.strip().split("...")))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def test_blocks_print_what_the_page_shows(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai", reason="the client is not installed")
    blocks = PYTHON.findall(PAGE)
    assert sum(bool(shown) for _, shown in blocks) > 4
    names: dict[str, Any] = {}
    for source, shown in blocks:
        source = source.replace("http://127.0.0.1:8000", server.url)
        exec(compile(source, "a block of the tutorial", "exec"), names)
        printed = capsys.readouterr().out
        assert is_shown(printed, shown), printed
    names["client"].close()


def test_the_server_says_what_the_page_shows(server: RunningServer) -> None:
    (shown,) = re.findall(r"```text\n(vllmx serves .*?), context", PAGE)
    assert any(line.startswith(shown.split(" on ")[0]) for line in server.lines), server.lines


def test_the_first_answer_is_the_one_that_the_page_shows(server: RunningServer) -> None:
    question = {"role": "user", "content": "What is 3 plus 4?"}
    answer = server.post("/v1/chat/completions", {"messages": [question], "temperature": 0}).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]
    for value in (message["content"], message["reasoning_content"]):
        assert f'"{value}"' in PAGE
    assert f'"completion_tokens": {usage["completion_tokens"]}' in PAGE
