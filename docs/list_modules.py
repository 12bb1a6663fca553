"""Makes the site's page of one line on each module: `python docs/list_modules.py`.

The line is the first sentence of the module's docstring, so that the list cannot differ from the
sources.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "modules.md"
ORDER = (
    "vllmx-core",
    "vllmx-engine",
    "vllmx-models",
    "vllmx-cpu",
    "vllmx-metal",
    "vllmx-torch",
    "vllmx-testing",
    "vllmx-cuda",
    "vllmx-tp",
    "vllmx-ray",
    "vllmx-server",
    "vllmx-demo",
    "vllmx",
)
HEAD = """# Modules

Written by `python docs/list_modules.py` from the first sentence of each module's docstring; do not
edit it by hand. [architecture.md](architecture.md) says how the parts work together.
"""


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line; empty without a docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.split("\n\n", 1)[0].split())
    return re.split(r"(?<=[\w`)\]])\.(?: |$)", first, maxsplit=1)[0].replace("|", "\\|")


def modules(package: Path) -> list[tuple[str, str]]:
    """(path below the import package, sentence) of each module, in the order of the paths."""
    source = package / "src" / package.name.replace("-", "_")
    found = [path for path in source.rglob("*.py") if path.name != "__init__.py"]
    return [
        (path.relative_to(source).as_posix(), sentence(path))
        for path in sorted(found, key=lambda path: path.relative_to(source).parts)
    ]


def page() -> str:
    """The whole page."""
    packages = {path.name: path for path in (ROOT / "packages").iterdir() if path.is_dir()}
    names = [name for name in ORDER if name in packages] + sorted(set(packages) - set(ORDER))
    text = HEAD
    for name in names:
        text += f"\n## {name}\n\n| module | |\n|-|-|\n"
        text += "".join(f"| {path} | {line} |\n" for path, line in modules(packages[name]))
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")
