"""Automata of regular parts of a GBNF grammar, which show where one lexeme continues when another
ends.

They are Glushkov's: one state for each character of the expression. Long repetitions count as
endless, so an automaton may accept more than the grammar, never less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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
T = TypeVar("T")
Ends = tuple[bool, frozenset[T], frozenset[T]]
"""True if a part may be empty; the sets that it begins and ends with."""
Join = Callable[[frozenset[T], frozenset[T]], None]
"""Notes that what the first set has may be followed by what the second one has."""
_States = frozenset[int]


def ends_of_choice(options: Iterable[Ends[T]]) -> Ends[T]:
    """The ends of a choice between parts."""
    may_lack, first, last = zip(*options, strict=True)
    return any(may_lack), frozenset().union(*first), frozenset().union(*last)


def ends_of_sequence(parts: Iterable[Ends[T]], join: Join[T]) -> Ends[T]:
    """The ends of parts that follow each other."""
    is_nullable, first, last = True, frozenset[T](), frozenset[T]()
    for may_lack, begins, ends in parts:
        join(last, begins)
        first = first | begins if is_nullable else first
        last = last | ends if may_lack else ends
        is_nullable = is_nullable and may_lack
    return is_nullable, first, last


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

    def _add(self, part: Expression) -> Ends[int]:
        """Adds the states of a part."""
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
                return ends_of_choice(map(self._add, _by_prefix(options)))
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

    def _add_all(self, parts: Iterable[Expression]) -> Ends[int]:
        return ends_of_sequence(map(self._add, parts), self._join)

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
