"""The examples of pages in docs/ run as they stand and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


EXAMPLES = examples("python.md")
PAGES = ("structured_output.md", "tools.md", "embeddings.md")
README = examples("../README.md")[0]
ALL = [README, *EXAMPLES, *(example for page in PAGES for example in examples(page))]


@pytest.mark.parametrize("example", ALL, ids=range(len(ALL)))
def test_example(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "an example of docs", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed
    for expected in re.findall(r"print\(.*\)  # (.+)", example):
        assert expected in printed


def test_there_are_examples_of_each_class() -> None:
    text = "".join(EXAMPLES)
    for name in ("LLM(", "Engine(", "AsyncLLM.start(", "generate_stream", ".cancel(", ".abort("):
        assert name in text
