"""Changes to the syntax of chat templates: one more tag, and a budget for plain Python.

Jinja compiles loops, literals and `~` to Python code that no method of the environment sees.
`Instrument` rewrites the syntax tree so that they become calls of the environment, which are
counted and measured like all others (see `template_sandbox`).
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


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
