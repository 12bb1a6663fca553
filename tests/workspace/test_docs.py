"""The documents stay true to the tree."""

from __future__ import annotations

import re
from pathlib import Path


def test_architecture_lists_every_module(root: Path) -> None:
    text = (root / "docs" / "architecture.md").read_text()
    sections = re.split(r"^### ", text, flags=re.M)[1:]
    for section in sections:
        name = section.split("\n", 1)[0].strip()
        source = root / "packages" / name / "src" / name.replace("-", "_")
        listed = set(re.findall(r"^\| (\S+\.py) \|", section, flags=re.M))
        found = {
            str(path.relative_to(source))
            for path in source.rglob("*.py")
            if path.name != "__init__.py"
        }
        assert listed == found, f"{name}: differs by {sorted(listed ^ found)}"
    assert len(sections) == len(list((root / "packages").iterdir()))


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    for page in [root / "README.md", *(root / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
