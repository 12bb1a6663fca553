"""What the pages show runs as it stands, against a real server: programs, and commands of curl."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from .conftest import RunningServer

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


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


def curls() -> list[tuple[str, str | None]]:
    """(URL, body) of the commands of curl on the pages; those to the socket of operators, and of
    models that make vectors, are left to tests of their own."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S):
            for text in re.findall(r"^curl (?:'[^']*'|\\\n|[^'\n])*", block, re.M):
                words = shlex.split(text.replace("\\\n", " "), comments=True)
                url = next(word for word in words if word.startswith("http"))
                if "--unix-socket" not in words and not url.endswith("/embeddings"):
                    found.append((url, words[words.index("-d") + 1] if "-d" in words else None))
    return found


def test_commands_of_curl_are_answered(server: RunningServer) -> None:
    found = curls()
    assert len(found) >= 3
    for url, body in found:
        path = url.removeprefix("http://127.0.0.1:8000")
        if body is None:
            answer = server.get(path)
        else:
            sent = {"max_tokens": 40, **json.loads(body)}
            answer = server.post(path, sent)
        assert answer.status_code == 200, (url, body, answer.text)
