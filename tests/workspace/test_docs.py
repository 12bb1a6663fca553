"""The documents stay true to the tree."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

# A docstring that begins so goes on with the name above it, and says nothing without that name.
FRAGMENT = re.compile(
    "(?:About|After|Against|Along|Also|Among|And|Around|As|At|Because|Before|Behind|Below|Beneath|"
    "Beside|Besides|Between|Beyond|But|By|During|Except|For|From|If|In|Inside|Instead|Into|Its|Like|"
    "Maybe|Neither|Never|Not|Of|Off|On|Once|Onto|Or|Out|Outside|Over|Per|Perhaps|Since|So|Such|That|"
    "Their|Then|There|Those|Through|To|Too|Toward|Under|Unless|Until|Up|Upon|Whatever|When|Where|"
    "Wherever|While|Who|Whoever|Whom|Whose|With|Within|Without)\\s"
)


def test_every_module_says_what_it_is(root: Path) -> None:
    lister = runpy.run_path(str(root / "docs" / "list_modules.py"))
    for package in (root / "packages").iterdir():
        silent = [path for path, line in lister["modules"](package) if not line]
        assert not silent, f"{package.name}: without a docstring: {silent}"


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    names = runpy.run_path(str(root / "docs" / "site.py"))["GENERATED"]
    generated = {root / "docs" / f"{name}.md" for name in names}
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            exists = (page.parent / target).exists() or page.parent / target in generated
            assert exists, f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """The anchors of a page, as the site and GitHub make them of its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in found}


def test_links_into_pages_lead_to_a_heading(root: Path) -> None:
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *root.glob("packages/*/README.md")]
    count = 0
    for page in pages:
        for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            target = page.parent / name if name else page
            if target.suffix == ".md" and target.exists():
                assert anchor in headings(target), f"{page.name} links to {name}#{anchor}"
                count += 1
    assert count > 50


def test_docstrings_stand_without_the_name_before_them(root: Path) -> None:
    """A docstring says what a thing is or does: "Bytes of a tile of 16 rows", not "Of 16 rows"."""
    places = ("packages/*/src", "bench", "docs", "examples/*/src")
    sources = [
        path
        for one in places
        for top in root.glob(one)
        for path in top.rglob("*.py")
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    found = [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in sources
        for line, text in _docstrings(ast.parse(path.read_text()))
        if FRAGMENT.match(text)
    ]
    assert not found, "docstrings that finish the sentence of a name:\n" + "\n".join(found)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: those of modules, classes and functions, and the texts
    behind attributes and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, one in pairwise([None, *body] if isinstance(body, list) else []):
            match one:
                case ast.Expr(ast.Constant(str(text))) if isinstance(
                    before, ast.Assign | ast.AnnAssign | None
                ):
                    yield one.lineno, text
