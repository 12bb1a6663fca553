"""Builds the documentation site: `nox -s docs`.

Copies docs/ and the README into build/docs, writes the generated pages there, and runs zensical.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "docs"
GENERATED = ("modules", "flags", "models", "api")
_UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*)[^)]*\)")


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in GENERATED:
        page = runpy.run_path(str(ROOT / "docs" / f"list_{name}.py"))["page"]()
        (PAGES / f"{name}.md").write_text(page, encoding="utf-8")
    for path in PAGES.rglob("*.md"):
        text = _UPWARDS.sub(partial(_kept, path), path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    readme = re.sub(r"\[([^\]]+)\]\((?:packages/|examples/|[A-Z]+\b)[^)]*\)", r"\1", readme)
    (PAGES / "index.md").write_text(readme, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - all of it is ours


def _kept(page: Path, link: re.Match[str]) -> str:
    """The link, or its text alone if it leads to a file that is not below docs/."""
    return link[0] if (page.parent / link[2]).is_file() else link[1]


if __name__ == "__main__":
    main()
