"""Chooses the parts of a GBNF grammar that are matched as one lexeme each.

llguidance reads lexemes (regular expressions) greedily and parses their sequence. Long lexemes are
fast: a mask for `[^"]*` as one lexeme takes a hundredth of the time that single characters take. A
long lexeme is wrong if it takes characters that the grammar needs for what
follows: `[a-z]+ "b"` would never match as two lexemes. So each part without recursion begins as
one lexeme, and those that can take too much are split until none can. A grammar without recursion
is one lexeme as a whole, which is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product

from vllmx_engine.grammar.automaton import (
    Automaton,
    Budget,
    Ends,
    Join,
    OutOfBudgetError,
    ends_of_choice,
    ends_of_sequence,
    overlap,
)
from vllmx_engine.grammar.characters import Ranges, normal, shared, without
from vllmx_engine.grammar.gbnf import (
    EMPTY,
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
)

Leaf = Lexeme | Token
_MAX_STEPS = 100_000
"""The work for one grammar, some 0.3 s; after it, lexemes are split no further."""


def with_lexemes(rules: Rules) -> Rules:
    """The rules that `root` uses, itself first, in which every text is part of a lexeme."""
    plan = _Plan(rules)
    try:
        while plan.split_overlaps():
            pass
    except OutOfBudgetError:  # a sound subset of the grammar is left
        pass
    return plan.marked()


class _Plan:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._is_regular: dict[str, bool] = {}
        self._split: dict[Expression, Ranges] = {}
        """Parts that are split, with the characters that they would take from others."""
        self._automata: dict[Lexeme, Automaton] = {}
        self._budget = Budget(_MAX_STEPS)

    def marked(self) -> Rules:
        """The rules with their lexemes."""
        found: Rules = {}
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self._marked(self._rules[name])
                waiting += _references(found[name])
        return found

    def split_overlaps(self) -> bool:
        """Splits lexemes that may take characters of what follows; False: none does."""
        rules = self.marked()
        ends, following = self._ends(rules)
        found: dict[Lexeme, Ranges] = {}
        seen = set[tuple[Leaf, Leaf]]()
        waiting = [*product(ends["root"][1], ends["root"][1])]
        while waiting:
            pair = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            first, other = pair
            if isinstance(first, Lexeme) and isinstance(other, Lexeme):
                match_same, goes_on = overlap(
                    self._automaton(first), self._automaton(other), self._budget
                )
                if taken := shared(goes_on, self._first_chars(following[first])):
                    found[other] = normal([*found.get(other, ()), *taken])
            else:
                match_same = isinstance(first, Token) and isinstance(other, Token)
            if match_same:
                waiting += product(following[first], following[other])
        for lexeme, taken in found.items():
            self._split[lexeme.part] = taken
        return bool(found)

    def _automaton(self, lexeme: Lexeme) -> Automaton:
        if lexeme not in self._automata:
            self._automata[lexeme] = Automaton(lexeme.part, self._rules, self._budget)
        return self._automata[lexeme]

    def _first_chars(self, leaves: Iterable[Leaf]) -> Ranges:
        ranges = [
            each
            for leaf in leaves
            if isinstance(leaf, Lexeme)
            for each in self._automaton(leaf).first_chars
        ]
        return normal(ranges)

    # --- marks ------------------------------------------------------------------------------------
    def _marked(self, part: Expression) -> Expression:
        if self._is_empty(part):
            return EMPTY
        if self._regular(part) and part not in self._split:
            return Lexeme(part)
        match part:
            case Literal(text):
                return Sequence(tuple(Lexeme(Literal(char)) for char in text))
            case Sequence(parts):
                return Sequence(tuple(self._runs(parts)))
            case Choice(options):
                return Choice(tuple(map(self._marked, options)))
            case Repeat(Chars(ranges), 0 | 1, None) if part in self._split:
                return self._loop(ranges, part)
            case Repeat(inner, least, most):
                return Repeat(self._marked(inner), least, most)
        return part

    def _runs(self, parts: tuple[Expression, ...]) -> Iterator[Expression]:
        """Neighbours without recursion are one lexeme."""
        run: list[Expression] = []
        for part in (*parts, None):
            if part is not None and self._regular(part):
                if not self._is_empty(part):
                    run.append(part)
                continue
            if len(run) > 1 and (joined := Sequence(tuple(run))) not in self._split:
                yield Lexeme(joined)
            else:
                yield from map(self._marked, run)
            run = []
            if part is not None:
                yield self._marked(part)

    def _loop(self, ranges: Ranges, loop: Repeat) -> Expression:
        """A loop over characters, in which those that others need are separate lexemes."""
        taken = shared(ranges, self._split[loop])
        single = Lexeme(Chars(taken))
        kept = without(ranges, taken)
        if not kept:
            return Repeat(single, loop.least, None)
        run = self._marked(Repeat(Chars(kept), 1, None))
        after = Sequence((single, Repeat(run, 0, 1)))
        begin = Repeat(run, 0, 1) if loop.least == 0 else Choice((run, after))
        return Sequence((begin, Repeat(after, 0, None)))

    def _is_empty(self, part: Expression) -> bool:
        """True if a part without recursion matches only the empty text."""
        match part:
            case Literal(text):
                return not text
            case Sequence(parts) | Choice(parts):
                return all(map(self._is_empty, parts))
            case Repeat(inner, _, most):
                return most == 0 or self._is_empty(inner)
            case Reference(name):
                return self._regular(part) and self._is_empty(self._rules[name])
        return False

    def _regular(self, part: Expression) -> bool:
        """True if a part has neither recursion nor tokens."""
        match part:
            case Token():
                return False
            case Reference(name):
                if name not in self._is_regular:
                    self._is_regular[name] = False  # it is, where it leads back to itself
                    self._is_regular[name] = self._regular(self._rules[name])
                return self._is_regular[name]
            case Sequence(parts) | Choice(parts):
                return all(self._regular(each) for each in parts)
            case Repeat(inner) | Lexeme(inner):
                return self._regular(inner)
        return True

    # --- order ------------------------------------------------------------------------------------
    def _ends(self, rules: Rules) -> tuple[dict[str, Ends[Leaf]], dict[Leaf, set[Leaf]]]:
        """The lexemes and tokens that each rule begins and ends with, and those that may follow
        each of them."""
        following = defaultdict[Leaf, set[Leaf]](set)

        def join(last: frozenset[Leaf], first: frozenset[Leaf]) -> None:
            for leaf in last:
                following[leaf] |= first

        known: dict[str, Ends[Leaf]] = dict.fromkeys(rules, (False, frozenset(), frozenset()))
        while True:
            found = {name: self._ends_of(part, known, join) for name, part in rules.items()}
            if found == known:
                return found, following
            known = found

    def _ends_of(
        self, part: Expression, known: dict[str, Ends[Leaf]], join: Join[Leaf]
    ) -> Ends[Leaf]:
        self._budget.spend(1)
        match part:
            case Lexeme() | Token():
                may_lack = isinstance(part, Lexeme) and self._automaton(part).is_nullable
                return may_lack, frozenset((part,)), frozenset((part,))
            case Reference(name):
                return known[name]
            case Choice(options):
                return ends_of_choice(self._ends_of(each, known, join) for each in options)
            case Sequence(parts):
                each = (self._ends_of(inner, known, join) for inner in parts)
                return ends_of_sequence(each, join)
            case Repeat(inner, least, most):
                may_lack, first, last = self._ends_of(inner, known, join)
                if most != 1:
                    join(last, first)
                return may_lack or least == 0, first, last
        raise AssertionError("texts are parts of lexemes")


def _references(part: Expression) -> Iterator[str]:
    """Names of the rules that a part uses outside of its lexemes."""
    match part:
        case Reference(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for each in parts:
                yield from _references(each)
        case Repeat(inner):
            yield from _references(inner)


def with_loops(rules: Rules) -> Rules:
    """The rules with loops in place of right recursion, as in `ws ::= ("-" ws)?`."""
    return {name: _as_loop(name, part) for name, part in rules.items()}


def _as_loop(name: str, part: Expression) -> Expression:
    tails = _tails(name, part)
    if tails is None:
        return part
    loops = tuple(_joined(parts) for parts, is_again in tails if is_again)
    ends = tuple(_joined(parts) for parts, is_again in tails if not is_again)
    if not loops or not ends:
        return part
    again = Repeat(loops[0] if len(loops) == 1 else Choice(loops), 0, None)
    return _joined((again, ends[0] if len(ends) == 1 else Choice(ends)))


_Tail = tuple[tuple[Expression, ...], bool]
"""The parts of one way through a rule, and whether the rule itself follows them."""


def _tails(name: str, part: Expression) -> list[_Tail] | None:
    """The ways through a part; None: the rule occurs before their ends."""
    if part == Reference(name):
        return [((), True)]
    if not _uses(part, name):
        return [((part,), False)]
    found: list[_Tail] = []
    match part:
        case Choice(options):
            for option in options:
                tails = _tails(name, option)
                if tails is None:
                    return None
                found += tails
            return found
        case Repeat(inner, 0, 1):
            tails = _tails(name, inner)
            return None if tails is None else [*tails, ((), False)]
        case Sequence((*before, last)) if not any(_uses(each, name) for each in before):
            tails = _tails(name, last)
            if tails is not None:
                return [((*before, *parts), is_again) for parts, is_again in tails]
    return None


def _uses(part: Expression, name: str) -> bool:
    return name in _references(part)


def _joined(parts: tuple[Expression, ...]) -> Expression:
    flat = [each for each in parts if each != EMPTY]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))
