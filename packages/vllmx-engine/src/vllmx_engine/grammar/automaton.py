"""Automata of regular parts of a GBNF grammar, which show where one lexeme continues when another
ends.

They are Glushkov's: one state for each character of the expression. Long repetitions count as
endless, so an automaton may accept more than the grammar, never less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllmx_engine.grammar.characters import Ranges, normal, shared
from vllmx_engine.grammar.gbnf import (
    Chars,
    Choice,
    Expression,
    Literal,
    Reference,
    Repeat,
    Rules,
    Sequence,
)

_COUNTED = 8
"""The longest repetition that is counted."""
_States = frozenset[int]


class OutOfBudgetError(Exception):
    """The grammar takes too much work."""


class Budget:
    """The steps left for a grammar."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def spend(self, steps: int) -> None:
        """Raises OutOfBudgetError."""
        self._steps -= steps
        if self._steps < 0:
            raise OutOfBudgetError


class Automaton:
    """The automaton of a part without recursion or tokens. Raises OutOfBudgetError."""

    def __init__(self, part: Expression, rules: Rules, budget: Budget) -> None:
        self._rules = rules
        self._budget = budget
        self.chars: list[Ranges] = []
        """The characters that lead to each state."""
        self.following: list[set[int]] = []
        """The states that may follow each."""
        self.is_nullable, self.first, self.last = self._add(part)
        self.first_chars = normal(each for state in self.first for each in self.chars[state])

    def _add(self, part: Expression) -> tuple[bool, _States, _States]:
        """Adds the states of a part; whether it may be empty, its first and last states."""
        match part:
            case Literal(text):
                return self._add_all([Chars(((ord(char), ord(char)),)) for char in text])
            case Chars(ranges):
                self._budget.spend(1)
                self.chars.append(ranges)
                self.following.append(set())
                only = frozenset((len(self.chars) - 1,))
                return False, only, only
            case Reference(name):
                return self._add(self._rules[name])
            case Sequence(parts):
                return self._add_all(parts)
            case Choice(options):
                each = [self._add(option) for option in _by_prefix(options)]
                first = _States().union(*(one[1] for one in each))
                return (
                    any(one[0] for one in each),
                    first,
                    _States().union(*(one[2] for one in each)),
                )
            case Repeat(inner, least, most) if most is not None and most <= _COUNTED:
                optional = Repeat(inner, 0, 1)
                if (least, most) == (0, 1):
                    return True, *self._add(inner)[1:]
                return self._add_all([*[inner] * least, *[optional] * (most - least)])
            case Repeat(inner, least):
                is_nullable, first, last = self._add(inner)
                self._join(last, first)
                return is_nullable or least == 0, first, last
        raise AssertionError("a lexeme has neither tokens nor lexemes")

    def _add_all(self, parts: Iterable[Expression]) -> tuple[bool, _States, _States]:
        is_nullable, first, last = True, _States(), _States()
        for part in parts:
            may_lack, begins, ends = self._add(part)
            self._join(last, begins)
            first = first | begins if is_nullable else first
            last = last | ends if may_lack else ends
            is_nullable = is_nullable and may_lack
        return is_nullable, first, last

    def _join(self, last: _States, first: _States) -> None:
        self._budget.spend(len(last) * len(first))
        for state in last:
            self.following[state] |= first


def _by_prefix(options: Iterable[Expression]) -> Iterator[Expression]:
    """The options, with literals that share a beginning merged, so that it has one state."""
    rests: dict[str, list[Expression]] = {}
    for option in options:
        if isinstance(option, Literal) and option.text:
            rests.setdefault(option.text[0], []).append(Literal(option.text[1:]))
        else:
            yield option
    for char, rest in rests.items():
        yield Sequence((Literal(char), rest[0] if len(rest) == 1 else Choice(tuple(rest))))


def overlap(one: Automaton, other: Automaton, budget: Budget) -> tuple[bool, Ranges]:
    """Returns whether some nonempty text matches both, and the characters by which `other`
    continues where a text of `one` ends. Raises OutOfBudgetError."""
    match_same, goes_on = False, set[int]()
    seen = set[tuple[int, int]]()
    budget.spend(len(one.first) * len(other.first))
    waiting = [(state, another) for state in one.first for another in other.first]
    while waiting:
        budget.spend(1)
        pair = waiting.pop()
        state, another = pair
        if pair in seen or not shared(one.chars[state], other.chars[another]):
            continue
        seen.add(pair)
        if state in one.last:
            match_same = match_same or another in other.last
            goes_on |= other.following[another]
        waiting += [(s, o) for s in one.following[state] for o in other.following[another]]
    return match_same, normal(each for state in goes_on for each in other.chars[state])
