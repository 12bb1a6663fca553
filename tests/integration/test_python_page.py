"""The examples of docs/python.md run as they stand and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "docs/python.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed
    for expected in re.findall(r"print\(.*\)  # (.+)", example):
        assert expected in printed


def test_there_are_examples_of_each_class() -> None:
    text = "".join(EXAMPLES)
    for name in ("LLM(", "Engine(", "AsyncLLM.start(", "generate_stream", ".cancel(", ".abort("):
        assert name in text
