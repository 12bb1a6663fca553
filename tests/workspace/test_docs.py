"""The documents stay true to the tree."""

from __future__ import annotations

import re
import runpy
from pathlib import Path


def test_list_of_modules_is_what_the_sources_say(root: Path) -> None:
    lister = runpy.run_path(str(root / "docs" / "list_modules.py"))
    assert (root / "docs" / "modules.md").read_text() == lister["page"](), (
        "run: python docs/list_modules.py"
    )


def test_every_module_says_what_it_is(root: Path) -> None:
    lister = runpy.run_path(str(root / "docs" / "list_modules.py"))
    for package in (root / "packages").iterdir():
        silent = [path for path, line in lister["modules"](package) if not line]
        assert not silent, f"{package.name}: without a docstring: {silent}"


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    for page in [root / "README.md", *(root / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
