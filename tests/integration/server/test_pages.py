"""The programs that pages show run as they stand, against a real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import RunningServer

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
    messages, responses, batches = programs("routes.md")
    names: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for program, variables in (
        (messages, own),
        (openai_chat, names),
        (responses, names),
        (batches, names),
    ):
        exec(program.replace("http://127.0.0.1:8000", server.url), variables)
    for variables in (own, names):
        variables["client"].close()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(printed)
    assert names["second"].previous_response_id == names["first"].id
    assert names["batch"].status in ("validating", "in_progress", "finalizing", "completed")
