"""Each line of docs/security.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def test_every_line_is_held_by_a_test(root: Path) -> None:
    page = (root / "docs" / "security.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "held by" not in line]
    promises = rows[rows.index(next(row for row in rows if "tests/" in row)) :]
    assert len(promises) > 20
    for row in promises:
        named = _TEST.findall(row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (root / file).read_text(), re.MULTILINE), (
                f"{file} has no {name}"
            )
