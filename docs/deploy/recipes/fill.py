"""Writes the recipes of this folder for a release: `python fill.py DIST VERSION OUT`.

DIST holds the sdists of VERSION, whose digests the recipes name.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def fill(dist: Path, version: str, out: Path) -> None:
    def value(found: re.Match[str]) -> str:
        if found[1] is None:
            return version
        sdist = dist / f"{found[1].replace('-', '_')}-{version}.tar.gz"
        return hashlib.sha256(sdist.read_bytes()).hexdigest()

    out.mkdir(parents=True, exist_ok=True)
    for path in (FOLDER / "vllmx.rb", FOLDER / "recipe.yaml"):
        text = re.sub(r"@(?:VERSION|SHA256 ([a-z-]+))@", value, path.read_text(encoding="utf-8"))
        (out / path.name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    fill(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
