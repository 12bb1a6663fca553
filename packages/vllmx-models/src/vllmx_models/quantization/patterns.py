"""Regular expressions from a config, matched in bounded time.

Python's `re` backtracks, which takes exponential time for patterns such as `(a|a)(a|a)...b`. This
matcher follows all alternatives at once, as the set of positions that they have reached: one bit
of an integer per position. `re` still parses, so the syntax is Python's, without the constructs
that need backtracking: back references and possessive repeats.

Sources: K. Thompson, Regular expression search algorithm, 1968; for repeats of one character R.
Cameron et al., Bitwise data parallelism in regular expression matching, 2014.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any

from vllmx_core.errors import UnsupportedModelError, shown

_parser: Any = import_module("re._parser")  # what `re.compile` parses with; it has no public name
_FLAGS = int(re.UNICODE | re.IGNORECASE | re.DOTALL | re.VERBOSE)
MAX_PATTERN_LENGTH = 1000
MAX_NAME_LENGTH = 1000
MAX_STEPS = 20_000
"""Limit of moves for one name; usual patterns need one for each character."""
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_ANCHORS = {
    "AT_BEGINNING": re.compile("^"),
    "AT_BEGINNING_STRING": re.compile(r"\A"),
    "AT_BOUNDARY": re.compile(r"\b"),
    "AT_NON_BOUNDARY": re.compile(r"\B"),
    "AT_END": re.compile("$"),
    "AT_END_STRING": re.compile(r"\Z"),
}
_CATEGORIES = {
    f"CATEGORY_{'NOT_' if sign.isupper() else ''}{name}": re.compile(f"\\{sign}")
    for name, signs in (("DIGIT", "dD"), ("SPACE", "sS"), ("WORD", "wW"))
    for sign in signs
}


class _TooLongError(Exception):
    """A match takes more than `MAX_STEPS`."""


class _Name:
    """The text to match: the positions of each character, and the remaining work limit."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.places_of: dict[str, int] = defaultdict(int)
        for place, character in enumerate(text):
            self.places_of[character] |= 1 << place
        self.steps_left = MAX_STEPS

    def step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise _TooLongError


Move = Callable[[_Name, int], int]
"""A function from the set of reached positions to the next one."""


class Pattern:
    """A regular expression; `source` is what errors name.

    Raises:
        UnsupportedModelError: it is invalid, too long, or uses an unsupported construct.
    """

    def __init__(self, text: str, source: str) -> None:
        self._label = f"{source}: the pattern {shown(text)}"
        if len(text) > MAX_PATTERN_LENGTH:
            raise UnsupportedModelError(
                f"{self._label} has {len(text)} characters, at most {MAX_PATTERN_LENGTH} are"
                " allowed: repair the config"
            )
        try:
            nodes = _parser.parse(text)
            flags = nodes.state.flags
            if flags & ~_FLAGS:
                raise ValueError("only the flags i, s and x are known here")
            self._move = _sequence(nodes, flags)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise UnsupportedModelError(
                f"{self._label} is not a regular expression ({error}): repair the config"
            ) from error

    def match(self, name: str) -> bool:
        """True if the beginning of `name` matches, as in `re.match`. Raises UnsupportedModelError
        if that takes too long."""
        try:
            if len(name) > MAX_NAME_LENGTH:
                raise _TooLongError
            return self._move(_Name(name), 1) != 0
        except _TooLongError:
            raise UnsupportedModelError(
                f"{self._label} takes too long on {shown(name)}, which has {len(name)} characters"
                f" of at most {MAX_NAME_LENGTH}: repair the config"
            ) from None


def _sequence(nodes: Any, flags: int) -> Move:
    moves = [_move(str(operation), argument, flags) for operation, argument in nodes]

    def run(name: _Name, places: int) -> int:
        for move in moves:
            if not places:
                break
            name.step()
            places = move(name, places)
        return places

    return run


def _move(operation: str, argument: Any, flags: int) -> Move:
    if operation in _CHARACTERS:
        places_with = _places_with(operation, argument, flags)
        return lambda name, places: (places & places_with(name)) << 1
    if operation == "BRANCH":
        return partial(_union, [_sequence(nodes, flags) for nodes in argument[1]])
    if operation == "SUBPATTERN" and not (argument[1] or argument[2]):
        return _sequence(argument[3], flags)
    if operation in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, body = argument
        return _repeat(low, high, body, flags)
    if operation in ("ASSERT", "ASSERT_NOT"):
        direction, body = argument
        return _assertion(direction, body, flags, negated=operation == "ASSERT_NOT")
    if operation == "AT":
        return partial(_kept, lambda name, at: _ANCHORS[str(argument)].match(name.text, at))
    if operation == "FAILURE":
        return lambda name, places: 0
    raise ValueError(f"{operation.lower().replace('_', ' ')} is not supported here")


def _union(moves: list[Move], name: _Name, places: int) -> int:
    found = 0
    for move in moves:
        found |= move(name, places)
    return found


def _kept(holds: Callable[[_Name, int], object], name: _Name, places: int) -> int:
    """The places among these where a condition holds."""
    found = 0
    for at in _bits(places):
        name.step()
        if holds(name, at):
            found |= 1 << at
    return found


def _bits(places: int) -> Iterator[int]:
    while places:
        yield (places & -places).bit_length() - 1
        places &= places - 1


def _repeat(low: int, high: int, body: Any, flags: int) -> Move:
    """Repeats `body`. Rounds are capped at the name's length: a round that does not advance adds
    nothing."""
    once = _sequence(body, flags)
    operation, argument = body[0] if len(body) == 1 else ("", None)
    if low <= 1 and high == _parser.MAXREPEAT and str(operation) in _CHARACTERS:
        return _run(_places_with(str(operation), argument, flags), needs_one=low == 1)

    def rounds(name: _Name, places: int) -> int:
        most = len(name.text) + 1
        for _ in range(min(low, most)):
            places = once(name, places)
        found = new = places
        for _ in range(min(int(high) - low, most)):
            new = once(name, new) & ~found
            if not new:
                break
            found |= new
        return found

    return rounds


def _run(places_with: Callable[[_Name], int], *, needs_one: bool) -> Move:
    """Repeats one character: the carries of a sum run over neighbouring places."""

    def run(name: _Name, places: int) -> int:
        fitting = places_with(name)
        if needs_one:
            places = (places & fitting) << 1
        return ((places & fitting) + fitting) ^ fitting | places

    return run


def _assertion(direction: int, body: Any, flags: int, *, negated: bool) -> Move:
    inside = _sequence(body, flags)
    back = body.getwidth()[0] if direction < 0 else 0  # `re` parses those of fixed width alone

    def holds(name: _Name, at: int) -> bool:
        ends = inside(name, 1 << (at - back)) if at >= back else 0
        return negated != bool(ends >> at & 1 if direction < 0 else ends)

    return partial(_kept, holds)


def _places_with(operation: str, argument: Any, flags: int) -> Callable[[_Name], int]:
    """Returns a function that finds the positions whose character the node accepts."""
    if operation == "LITERAL" and not flags & re.IGNORECASE:
        return lambda name: name.places_of.get(chr(argument), 0)
    items = argument if operation == "IN" else [(operation.removeprefix("NOT_"), argument)]
    negated = operation == "NOT_LITERAL" or str(items[0][0]) == "NEGATE"

    @cache
    def fits(character: str) -> bool:
        if operation == "ANY":
            return bool(flags & re.DOTALL) or character != "\n"
        cases = {character}
        if flags & re.IGNORECASE:
            cases |= {character.lower(), character.upper()}
        return negated != any(_in_class(str(k), v, case) for k, v in items for case in cases)

    return lambda name: sum(places for c, places in name.places_of.items() if fits(c))


def _in_class(kind: str, value: Any, character: str) -> bool:
    """True if an entry of [...] contains the character."""
    if kind == "LITERAL":
        return character == chr(value)
    if kind == "RANGE":
        return chr(value[0]) <= character <= chr(value[1])
    return kind == "CATEGORY" and _CATEGORIES[str(value)].match(character) is not None
