"""Imports inside a package have no circle: neither between modules nor between folders."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGES = sorted(path.name for path in (Path(__file__).parents[2] / "packages").iterdir())
Graph = Mapping[str, set[str]]


def module_names(source: Path) -> dict[str, Path]:
    """All modules below a `src` folder, by their dotted names."""
    found = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a file imports, wherever it does: at its top, for type checkers alone, or
    inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                child = f"{node.module}.{alias.name}"
                yield child if child in modules else node.module


def import_graph(source: Path) -> dict[str, set[str]]:
    modules = module_names(source)
    return {
        name: set(imported(ast.parse(path.read_text()), modules)) - {name}
        for name, path in modules.items()
    }


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach one another, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def folder_graphs(graph: Graph) -> dict[str, dict[str, set[str]]]:
    """For each folder, the arrows between its children, which are modules or folders."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, others in graph.items():
        for other in others:
            mine, theirs = name.split("."), other.split(".")
            depth = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None
            )
            if depth is not None:  # else one of them is the other's folder
                folder = ".".join(mine[:depth])
                found[folder][mine[depth]].add(theirs[depth])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_circle(package: str, root: Path) -> None:
    graph = import_graph(root / "packages" / package / "src")
    assert circles(graph) == []
    wrong = {folder: circles(children) for folder, children in folder_graphs(graph).items()}
    assert {folder: groups for folder, groups in wrong.items() if groups} == {}


def test_circles_are_found(tmp_path: Path) -> None:
    """By imports at the top, for type checkers and in functions; between folders, too."""
    files = {
        "p/__init__.py": "",
        "p/a/__init__.py": "",
        "p/a/x.py": "from p.b import y\n",
        "p/a/z.py": "",
        "p/b/__init__.py": "",
        "p/b/y.py": "def f():\n    import p.a.z\n",
        "p/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.d import D\n",
        "p/d.py": "import p.c\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = import_graph(tmp_path)
    assert circles(graph) == [["p.c", "p.d"]]
    assert sorted(circles(folder_graphs(graph)["p"])) == [
        ["a", "b"],
        ["c", "d"],
    ]
