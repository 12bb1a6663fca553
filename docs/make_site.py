"""Copies the pages that the site shows into build/pages/docs: `python docs/make_site.py`.

README.md becomes the first page. Links to files outside docs/, such as sources and examples, become
plain text.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TARGET = ROOT / "build" / "pages" / "docs"


def moved(text: str, source: Path) -> str:
    """The text of a page with links that hold on the site."""

    def link(found: re.Match[str]) -> str:
        label, path, anchor = found.groups(default="")
        target = Path(os.path.normpath(source.parent / path))
        if not target.is_file() or not target.is_relative_to(DOCS):
            return label
        base = source.parent if source.is_relative_to(DOCS) else DOCS
        return f"[{label}]({Path(os.path.relpath(target, base)).as_posix()}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)", link, text)


def make() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(DOCS, TARGET, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in DOCS.rglob("*.md"):
        text = moved(path.read_text(encoding="utf-8"), path)
        (TARGET / path.relative_to(DOCS)).write_text(text, encoding="utf-8")
    readme = ROOT / "README.md"
    (TARGET / "index.md").write_text(
        moved(readme.read_text(encoding="utf-8"), readme), encoding="utf-8"
    )


if __name__ == "__main__":
    make()
