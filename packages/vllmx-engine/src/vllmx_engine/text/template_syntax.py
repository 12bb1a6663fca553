"""The syntax of chat templates: extensions that they use, and which parts of messages they read."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from vllmx_engine.text.messages import TemplateReads


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant says: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class Instrument(NodeTransformer):
    """Adds the budget to what Jinja compiles to plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """A step per iteration, also for the items that the loop's own test leaves out."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("count_step", [])))
        if node.test is not None:
            node.test = nodes.And(_environment_call("count_step", []), node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        """`a ~ b` is measured before it is joined."""
        self.generic_visit(node)
        return _environment_call("join_values", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        """A literal with variables inside is measured, since it may multiply them."""
        self.generic_visit(node)
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if constant else _environment_call("new_container", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        """The same as for a list, unless the tuple is the target of an assignment."""
        self.generic_visit(node)
        return _environment_call("new_container", [node]) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        """Bounds a dictionary in the way of a list."""
        self.generic_visit(node)
        return _environment_call("new_container", [node])


def _environment_call(name: str, args: list[nodes.Expr]) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def reads_of(tree: nodes.Template) -> TemplateReads:
    """The forms of messages that a template takes, by the syntax tree of the unchanged source."""
    takes_parts = _reads_content_parts(tree)
    constants = (each.value for each in tree.find_all(nodes.Const))
    return TemplateReads(
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
    arguments = (each.name for macro in tree.find_all(nodes.Macro) for each in macro.args)
    names |= {"content"}.intersection(arguments)
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        while isinstance(source, nodes.Filter) and source.node is not None:
            source = source.node
        if _is_content(source) or (isinstance(source, nodes.Name) and source.name in names):
            return True
    return False


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == "content")
    return False


def _tests_for_text(tree: nodes.Template) -> bool:
    """True if the template distinguishes strings from parts."""
    return any(
        test.name in ("string", "iterable", "sequence", "mapping")
        for test in tree.find_all(nodes.Test)
    )


def _tests_for_none(tree: nodes.Template) -> bool:
    return any(test.name == "none" and _is_content(test.node) for test in tree.find_all(nodes.Test))
