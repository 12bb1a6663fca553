"""Which parts of a conversation a chat template reads, by its syntax tree."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from vllmx_core.records import Record


class TemplateReads(Record):
    """The forms of messages that a template takes."""

    takes_parts: bool
    """It loops over a message's content, or over a variable set to it."""
    takes_text: bool
    """It takes content that is a string."""
    takes_none: bool
    """It tests whether content is none."""
    strings: frozenset[str]
    """All string literals, including roles."""
    variables: frozenset[str]
    """The variables that it expects from outside."""

    @classmethod
    def of(cls, tree: nodes.Template) -> TemplateReads:
        """Reads the syntax tree of the unchanged source."""
        takes_parts = _reads_content_parts(tree)
        constants = (each.value for each in tree.find_all(nodes.Const))
        return cls(
            takes_parts=takes_parts,
            takes_text=not takes_parts or _tests_for_text(tree),
            takes_none=_tests_for_none(tree),
            strings=frozenset(each for each in constants if isinstance(each, str)),
            variables=frozenset(find_undeclared_variables(tree)),
        )


def _reads_content_parts(tree: nodes.Template) -> bool:
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    names.update(name for name in _macro_arguments(tree) if name == "content")
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        while isinstance(source, nodes.Filter) and source.node is not None:
            source = source.node
        if _is_content(source) or (isinstance(source, nodes.Name) and source.name in names):
            return True
    return False


def _macro_arguments(tree: nodes.Template) -> Iterator[str]:
    for macro in tree.find_all(nodes.Macro):
        for argument in macro.args:
            yield argument.name


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == "content")
    return False


def _tests_for_text(tree: nodes.Template) -> bool:
    """Whether the template distinguishes strings from parts."""
    return any(
        test.name in ("string", "iterable", "sequence", "mapping")
        for test in tree.find_all(nodes.Test)
    )


def _tests_for_none(tree: nodes.Template) -> bool:
    return any(test.name == "none" and _is_content(test.node) for test in tree.find_all(nodes.Test))
