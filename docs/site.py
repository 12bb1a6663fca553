"""Builds the documentation site: `nox -s docs`.

Copies docs/ and the README into build/docs, writes the generated pages there, and runs zensical.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "docs"
GENERATED = ("modules", "flags", "models", "api")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")
"""A link to a file that is not below docs/: the site shows its text alone."""


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in GENERATED:
        page = runpy.run_path(str(ROOT / "docs" / f"list_{name}.py"))["page"]()
        (PAGES / f"{name}.md").write_text(page, encoding="utf-8")
    for path in PAGES.rglob("*.md"):
        path.write_text(_OUTSIDE.sub(r"\1", path.read_text(encoding="utf-8")), encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    readme = re.sub(r"\[([^\]]+)\]\((?:packages/|examples/|[A-Z]+\b)[^)]*\)", r"\1", readme)
    (PAGES / "index.md").write_text(readme, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - all of it is ours


if __name__ == "__main__":
    main()
