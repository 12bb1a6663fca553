"""Seven habits of phrasing that stop a native reader, found in docstrings, comments, messages and
docs: `python tests/workspace/test_words.py PATH ...` prints them."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PLACES = sorted(path.name for path in (ROOT / "packages").iterdir())
REMAINING = {
    "vllmx": 0,
    "vllmx-core": 0,
    "vllmx-cpu": 0,
    "vllmx-cuda": 0,
    "vllmx-demo": 0,
    "vllmx-engine": 0,
    "vllmx-metal": 0,
    "vllmx-models": 0,
    "vllmx-ray": 0,
    "vllmx-server": 0,
    "vllmx-testing": 0,
    "vllmx-torch": 0,
    "vllmx-tp": 0,
    "docs": 0,
}
"""Findings of packages that are not rewritten yet; a number here may only fall."""

_FRONTED = r"(?:a|an|the|all|its|their|what|those|these|one|each|every|two|several|such|who\w*)"
_COMPARED = (
    r"(?:longer|more|less|fewer|one|worse|better|later|earlier|greater|larger|smaller|slower)"
)
HABITS = {
    "fronted 'Of ...': name the subject first": rf"(?:^|[.!?:;]\s+)Of {_FRONTED}\b",
    "'beside': with, next to or compared with": r"\b[Bb]eside\b",
    "'is told': gets, learns, is reported": r"\b(?:is|are|was|were|be|been) told\b",
    "'comes to': is, amounts to": r"\b(?:come|comes|came) to\b",
    "'stands': is": r"\b(?:stands|stood)\b(?! for\b)|\b[Ss]tand(?:ing)? (?:in|on|at|before)\b",
    "'is no ...': is not a ...": rf"(?<!here )\b(?:is|are|was|were) no (?!{_COMPARED}\b)\w",
}
"""What to write instead, and the pattern of each habit."""
NAMED_BY_A_CLAUSE = "a clause as a name: begin with a noun, a verb or 'True if'"
_CLAUSE = re.compile(r"(?:What|Who|Whom|Whose|Whoever|How|Whether|Where|Which)\b")
_MESSAGES = {"debug", "info", "warning", "error", "exception", "critical", "echo"}


class Finding(NamedTuple):
    path: Path
    line: int
    habit: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.habit}: {self.text}"


def check(path: Path, line: int, text: str, *, is_docstring: bool = False) -> Iterator[Finding]:
    if is_docstring and _CLAUSE.match(text):
        yield Finding(path, line, NAMED_BY_A_CLAUSE, text[:60].splitlines()[0])
    flat = re.sub(r"\s+", " ", text)
    for habit, pattern in HABITS.items():
        for found in re.finditer(pattern, flat):
            begin = max(0, found.start() - 20)
            yield Finding(path, line, habit, "..." + flat[begin : found.end() + 25])


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of everything in a module that people read."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value), True
        elif isinstance(node, ast.Raise) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _MESSAGES
        ):
            yield from ((line, text, False) for line, text in _strings(node))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: "), False


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, part.value


def in_module(path: Path) -> Iterator[Finding]:
    for line, text, is_docstring in texts(path):
        yield from check(path, line, text, is_docstring=is_docstring)


def in_page(path: Path) -> Iterator[Finding]:
    """Of a Markdown page, without its code."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.S)
    for number, paragraph in enumerate(text.split("\n"), 1):
        yield from check(path, number, re.sub(r"`[^`]*`", "`", paragraph))


def findings(*places: Path) -> list[Finding]:
    """Those of all modules and pages below some folders, or of single files."""
    found = []
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix == ".py":
                found += in_module(path)
            elif path.suffix == ".md":
                found += in_page(path)
    return found


@pytest.mark.parametrize("package", PLACES)
def test_packages_read_like_plain_english(package: str) -> None:
    found = findings(ROOT / "packages" / package / "src")
    limit = REMAINING.get(package, 0)
    assert len(found) <= limit, "\n".join(map(str, found))
    assert not limit or limit - len(found) < 20, f"lower REMAINING to {len(found)}"


def test_pages_read_like_plain_english() -> None:
    found = findings(ROOT / "docs", ROOT / "bench" / "README.md", *ROOT.glob("*.md"))
    assert len(found) <= REMAINING.get("docs", 0), "\n".join(map(str, found))


@pytest.mark.parametrize(
    "text",
    [
        "Of a long prompt this is most.",
        "The keys beside the others.",
        "The client is told why.",
        "What this comes to.",
        "The table stands in a file.",
        "This is no request.",
    ],
)
def test_habits_are_found(text: str) -> None:
    assert len(list(check(Path(), 1, text))) == 1


def test_clauses_as_names_are_found_in_docstrings_alone() -> None:
    text = "What a step computes."
    assert len(list(check(Path(), 1, text, is_docstring=True))) == 1
    assert not list(check(Path(), 1, text))


@pytest.mark.parametrize(
    "text",
    ["Part of a prompt.", "There is no model.", "It is no longer used.", "A stand-alone file."],
)
def test_plain_sentences_pass(text: str) -> None:
    assert not list(check(Path(), 1, text, is_docstring=True))


if __name__ == "__main__":
    every = findings(*map(Path, sys.argv[1:]))
    print(*every, f"{len(every)} findings", sep="\n")
