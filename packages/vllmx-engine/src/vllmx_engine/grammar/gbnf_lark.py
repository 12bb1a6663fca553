"""Writes a GBNF grammar in Lark as llguidance has it."""

from __future__ import annotations

from vllmx_core.errors import GrammarError

from vllmx_engine.grammar.characters import lark_text, regex_of
from vllmx_engine.grammar.gbnf import (
    Chars,
    Choice,
    Expression,
    Lexeme,
    Literal,
    Reference,
    Repeat,
    Rules,
    Sequence,
    Token,
    parse_gbnf,
)
from vllmx_engine.grammar.lexemes import with_lexemes, with_loops
from vllmx_engine.grammar.vocabulary import Lexicon

_MAX_DEPTH = 12
"""Nesting of groups in a line: the library allows little."""
_TIMES = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def lark_of_gbnf(text: str, lexicon: Lexicon | None, prefix: str = "") -> tuple[str, list[str]]:
    """The name of the grammar's first rule, and the lines of all its rules and terminals. Raises
    GrammarError.

    Args:
        lexicon: the tokens that the grammar may name.
        prefix: begins the names of rules, in small letters.
    """
    try:
        rules = with_loops(
            parse_gbnf(text, lambda given: lexicon.token_id(given) if lexicon else None)
        )
        return _Lark(rules, lexicon.eos_ids if lexicon else (), prefix).written()
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply: flatten it") from None


class _Lark:
    """Rules and terminals are named by numbers, since names of GBNF may differ only in case or in -
    and _."""

    def __init__(self, rules: Rules, eos_ids: tuple[int, ...], prefix: str) -> None:
        self._rules = rules
        self._marked = with_lexemes(rules)
        self._eos_ids = eos_ids
        """Negated tokens exclude these too, since they end an answer."""
        self._prefix = prefix
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._names: dict[tuple[Expression, bool], str] = {}
        self._unwritten: list[tuple[str, Expression, bool]] = []

    def written(self) -> tuple[str, list[str]]:
        """The name of the first rule, and all lines."""
        lines = [
            f"{self._rule(name)}: {self._spelled(part)}" for name, part in self._marked.items()
        ]
        while self._unwritten:
            name, part, in_terminal = self._unwritten.pop()
            lines.append(f"{name}: {self._spelled(part, in_terminal=in_terminal)}")
        return self._rule("root"), lines

    def _rule(self, name: str) -> str:
        return f"{self._prefix}rule_{self._numbers[name]}"

    def _named(self, part: Expression, *, in_terminal: bool) -> str:
        """The name of the line for a part of others."""
        key = (part, in_terminal)
        if key not in self._names:
            kind = f"{self._prefix.upper()}TEXT" if in_terminal else f"{self._prefix}part"
            self._names[key] = name = f"{kind}_{len(self._names)}"
            body = self._rules[part.name] if isinstance(part, Reference) else part
            self._unwritten.append((name, body, in_terminal))
        return self._names[key]

    def _spelled(self, part: Expression, *, in_terminal: bool = False, depth: int = 0) -> str:
        match part:
            case Literal(text):
                return lark_text(text)
            case Chars(ranges):
                return f"/{regex_of(ranges)}/"
            case Lexeme(inner):
                return self._named(inner, in_terminal=True)
            case Reference(name):
                return self._named(part, in_terminal=True) if in_terminal else self._rule(name)
            case Token(token, is_excluded):
                if not is_excluded:
                    return f"<[{token}]>"
                listed = ",".join(map(str, sorted({token, *self._eos_ids})))
                return f"<[^{listed}]>"
        if depth == _MAX_DEPTH:
            return self._named(part, in_terminal=in_terminal)

        def inside(inner: Expression) -> str:
            return self._spelled(inner, in_terminal=in_terminal, depth=depth + 1)

        match part:
            case Repeat(_, _, 0):
                return '""'
            case Repeat(inner, least, most):
                times = _TIMES.get((least, most), f"{{{least},{'' if most is None else most}}}")
                return f"({inside(inner)}){times}"
            case Sequence(parts):
                return f"({' '.join(map(inside, parts))})" if parts else '""'
            case Choice(options):
                return f"({' | '.join(map(inside, options))})"
        raise AssertionError("all kinds of parts are written")
