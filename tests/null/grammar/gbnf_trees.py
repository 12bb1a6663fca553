"""Random GBNF grammars as trees, how they are written, and which texts they stand for."""

from __future__ import annotations

import random
import re

from vllmx_engine.grammar.characters import Ranges, normal
from vllmx_engine.grammar.gbnf import (
    ANY,
    Chars,
    Choice,
    Expression,
    Literal,
    Reference,
    Repeat,
    Rules,
    Sequence,
    Token,
)

NAMES = ("root", "a", "A", "a-b", "a_b", "aB", "7")
TIMES = ((0, None), (1, None), (0, 1), (2, 2), (0, 3), (1, 2), (2, None))
_BLANKS = (" ", "  ", "\t", "\n", "\n  ", ' # a | "b" ) ::= \n', "\r\n")


class Trees:
    """Draws grammars.

    Args:
        alphabet: the characters of their texts.
        tokens: whether they name tokens.
    """

    def __init__(self, seed: int, alphabet: str, *, tokens: bool = False) -> None:
        self._rng = random.Random(seed)
        self._alphabet = alphabet
        self._tokens = tokens

    def rules(self, names: int, depth: int) -> Rules:
        """Rules whose names are the first of `NAMES`."""
        self._names = NAMES[:names]
        return {name: self._part(depth) for name in self._names}

    def regular(self, depth: int) -> Rules:
        """Rules of which each uses later ones alone."""
        found: Rules = {}
        for number, name in enumerate(NAMES[:3]):
            self._names = NAMES[number + 1 : 3]
            found[name] = self._part(depth)
        return found

    def text(self, length: int) -> str:
        """Characters that have nothing to do with a grammar."""
        return "".join(self._rng.choices(self._alphabet, k=self._rng.randint(0, length)))

    def _part(self, depth: int) -> Expression:
        rng = self._rng
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return self._leaf()
        if kind < 0.55:
            return Sequence(tuple(self._part(depth - 1) for _ in range(rng.choice((0, 2, 2, 3)))))
        if kind < 0.8:
            return Choice(tuple(self._part(depth - 1) for _ in range(rng.randint(2, 3))))
        return Repeat(self._part(depth - 1), *rng.choice(TIMES))

    def _leaf(self) -> Expression:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.3 and self._names:
            return Reference(rng.choice(self._names))
        if kind < 0.4 and self._tokens:
            return Token(rng.randrange(4000), rng.random() < 0.5)
        if kind < 0.7:
            return Literal("".join(rng.choices(self._alphabet, k=rng.randint(0, 3))))
        if kind < 0.75:
            return ANY
        ends = [sorted((self._code(), self._code())) for _ in range(rng.randint(1, 3))]
        found = normal(((low, high) for low, high in ends), is_excluded=rng.random() < 0.3)
        return Chars(found) if found else ANY

    def _code(self) -> int:
        return ord(self._rng.choice(self._alphabet))


def written(rules: Rules, seed: int) -> str:
    """The grammar in GBNF, with blanks, comments and escapes here and there."""
    rng = random.Random(seed)
    return "".join(
        f"{name} ::={_blank(rng)}{_written(part, rng)}\n" for name, part in rules.items()
    )


def _blank(rng: random.Random) -> str:
    return rng.choice(_BLANKS) if rng.random() < 0.2 else " "


def _written(part: Expression, rng: random.Random) -> str:
    match part:
        case Literal(text):
            return f'"{"".join(_escaped(ord(char), rng, in_class=False) for char in text)}"'
        case Chars(ranges):
            return "." if part == ANY and rng.random() < 0.8 else _class(ranges, rng)
        case Token(token, is_excluded):
            return f"{'!' if is_excluded else ''}<[{token}]>"
        case Reference(name):
            return name
        case Sequence(parts):
            each = [_grouped(one, rng, Sequence | Choice) for one in parts]
            return _blank(rng).join(each) if each else "()"
        case Choice(options):
            return f"{_blank(rng)}|{_blank(rng)}".join(
                _grouped(one, rng, Choice) for one in options
            )
        case Repeat(inner, least, most):
            marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
            counted = f"{{{least}}}" if least == most else f"{{ {least},{most or ''} }}"
            return _grouped(inner, rng, Sequence | Choice) + marks.get((least, most), counted)
    raise AssertionError(part)


def _grouped(part: Expression, rng: random.Random, groups: object) -> str:
    inner = _written(part, rng)
    if inner != "()" and (isinstance(part, groups) or rng.random() < 0.1):  # type: ignore[arg-type]
        return f"({_blank(rng)}{inner}{_blank(rng)})"
    return inner


def _class(ranges: Ranges, rng: random.Random) -> str:
    excluded = normal(ranges, is_excluded=True)
    sign, listed = ("^", excluded) if excluded and rng.random() < 0.5 else ("", ranges)
    each = (
        _escaped(low, rng, in_class=True)
        + ("" if low == high else "-" + _escaped(high, rng, in_class=True))
        for low, high in listed
    )
    return f"[{sign}{''.join(each)}]"


def _escaped(code: int, rng: random.Random, *, in_class: bool) -> str:
    char = chr(code)
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if char in short and rng.random() < 0.7:
        return short[char]
    if char in ('-^[]\\"' if in_class else '"\\'):
        return "\\" + char if char != "^" else "\\x5e"
    if rng.random() < 0.2 or not char.isprintable():
        size = 2 if code < 0x100 else 4 if code < 0x10000 else 8
        return "\\" + {2: "x", 4: "u", 8: "U"}[size] + f"{code:0{size}x}"
    return char


def begins_with_itself(rules: Rules) -> bool:
    """Whether a rule may begin with itself, which llama.cpp refuses."""
    empty = {name for name in rules if Language(rules, "").matches(name)}
    first = {name: _first(part, empty) for name, part in rules.items()}
    for _ in rules:
        first = {name: names.union(*(first[one] for one in names)) for name, names in first.items()}
    return any(name in names for name, names in first.items())


def _first(part: Expression, empty: set[str]) -> set[str]:
    """The rules that may begin a part."""
    match part:
        case Reference(name):
            return {name}
        case Choice(options):
            return set[str]().union(*(_first(each, empty) for each in options))
        case Repeat(inner):
            return _first(inner, empty)
        case Sequence(parts):
            found = set[str]()
            for each in parts:
                found |= _first(each, empty)
                if not _may_be_empty(each, empty):
                    break
            return found
    return set()


def _may_be_empty(part: Expression, empty: set[str]) -> bool:
    match part:
        case Literal(text):
            return not text
        case Reference(name):
            return name in empty
        case Choice(options):
            return any(_may_be_empty(each, empty) for each in options)
        case Sequence(parts):
            return all(_may_be_empty(each, empty) for each in parts)
        case Repeat(inner, least):
            return least == 0 or _may_be_empty(inner, empty)
    return False


def regex(part: Expression, rules: Rules) -> str:
    """The same as a regular expression of Python; for rules without recursion."""
    match part:
        case Literal(text):
            return f"(?:{re.escape(text)})"
        case Chars(ranges):
            each = (f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
            return f"[{''.join(each)}]"
        case Reference(name):
            return regex(rules[name], rules)
        case Sequence(parts):
            return f"(?:{''.join(regex(one, rules) for one in parts)})"
        case Choice(options):
            return f"(?:{'|'.join(regex(one, rules) for one in options)})"
        case Repeat(inner, least, most):
            return f"(?:{regex(inner, rules)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(part)


class Language:
    """Which texts a grammar without tokens stands for, found by trying everything."""

    def __init__(self, rules: Rules, text: str) -> None:
        self._rules = rules
        self._text = text
        self._ends = {(name, at): frozenset[int]() for name in rules for at in range(len(text) + 1)}

    def matches(self, name: str = "root") -> bool:
        """Whether the whole text is one of a rule's."""
        while True:
            found = {(one, at): self._of(self._rules[one], at) for one, at in self._ends}
            if found == self._ends:
                return len(self._text) in found[name, 0]
            self._ends = found

    def _of(self, part: Expression, at: int) -> frozenset[int]:
        """Where a part may end that begins at a place."""
        match part:
            case Literal(text):
                return frozenset((at + len(text),) if self._text.startswith(text, at) else ())
            case Chars(ranges):
                code = ord(self._text[at]) if at < len(self._text) else -1
                return frozenset((at + 1,) if any(a <= code <= b for a, b in ranges) else ())
            case Reference(name):
                return self._ends[name, at]
            case Sequence(parts):
                ends = frozenset((at,))
                for each in parts:
                    ends = self._behind(each, ends)
                return ends
            case Choice(options):
                return frozenset[int]().union(*(self._of(each, at) for each in options))
            case Repeat(inner, least, most):
                ends = frozenset((at,))
                found = ends if least == 0 else frozenset[int]()
                for number in range(1, (least + len(self._text) if most is None else most) + 1):
                    ends = self._behind(inner, ends)
                    found = found | ends if number >= least else found
                return found
        raise AssertionError(part)

    def _behind(self, part: Expression, starts: frozenset[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self._of(part, start) for start in starts))
