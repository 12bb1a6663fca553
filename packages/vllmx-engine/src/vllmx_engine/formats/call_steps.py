"""Calls of tools, read while they come."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from vllmx_core.output_format import (
    Calls,
    JsonArguments,
    JsonCall,
    NamedCall,
    TaggedArguments,
    ValueArguments,
)

from vllmx_engine.formats import json_steps, tool_schemas
from vllmx_engine.formats.cursor import Cursor, Steps, TextEndError, Triggers
from vllmx_engine.formats.events import AnswerEvents
from vllmx_engine.formats.json_steps import escaped
from vllmx_engine.formats.tool_schemas import Tools, is_string, json_of

T = TypeVar("T")
_MAX_HEADER = 512
_MAX_KEY = 1024
_ARGUMENTS = ("arguments", "parameters")
"""Models take one for the other."""


class CallReader:
    """Reads the calls of one answer.

    Args:
        calls: how they are written.
        tools: of the request.
    """

    def __init__(self, calls: Calls, tools: Tools, cursor: Cursor, events: AnswerEvents) -> None:
        self._calls = calls
        self._tools = tools
        self._cursor = cursor
        self._events = events
        self.begun = False
        """The call at hand has a name, and so is one; its end has not come."""
        self._num_chars = 0
        self._name: str | None = None
        self._id: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""

    def one(self) -> Steps[bool]:
        """Reads one call with its markers; False if there is none here."""
        self.begun = False
        if not (yield from self._cursor.take(self._calls.begin)):
            return False
        call = self._calls.call
        if isinstance(call, JsonCall):
            found = yield from self._json_call(call)
        else:
            found = yield from self._named_call(call)
        if not found:
            return False
        self._events.end()
        self.begun = False
        try:
            yield from self._cursor.take(self._calls.end)
        except TextEndError:
            self._cursor.at = len(self._cursor.text)
        return True

    def _begin(self, name: str, call_id: str | None) -> bool:
        if (self._calls.is_bare or self._calls.known_only) and name not in self._tools:
            return False
        self.begun = True
        self._cursor.held = False
        self._events.begin(name, call_id)
        return True

    def _emit(self, text: str) -> None:
        self._num_chars += len(text)
        self._events.arguments(text)

    # --- calls that are a JSON object ----------------------------------------------------------
    def _json_call(self, call: JsonCall) -> Steps[bool]:
        cursor = self._cursor
        if not (yield from cursor.take("{")):
            return False
        if call.name is None:
            name = yield from json_steps.string(cursor)
            if not name or not (yield from cursor.take(":")) or not self._begin(name, None):
                return False
            yield from self._json_arguments()
            return (yield from cursor.take("}")) or True
        self._name = self._id = self._early = None
        if not (yield from self._members(call)):
            return False
        if not self.begun:
            if self._name is None or (self._early is None and self._calls.is_bare):
                return False
            if not self._begin(self._name, self._id):
                return False
            self._events.arguments(self._early or "{}")
        return True

    def _members(self, call: JsonCall) -> Steps[bool]:
        """Reads the members of an object, in any order, from behind its first brace to its end.
        Returns False if it is not a call."""
        cursor = self._cursor
        while not (yield from cursor.take("}")):
            yield from cursor.take(",")
            key = yield from json_steps.string(cursor)
            if key is None or not (yield from cursor.take(":")):
                return self.begun
            if not (yield from self._member(call, key)):
                return self.begun
        return True

    def _member(self, call: JsonCall, key: str) -> Steps[bool]:
        cursor = self._cursor
        if key == call.wrapper and (yield from cursor.take("{")):
            return (yield from self._members(call))
        if key == call.name and not self.begun:
            self._name = yield from json_steps.string(cursor)
            return bool(self._name)
        if key == call.id and (yield from cursor.peek()) == '"':
            self._id = yield from json_steps.string(cursor)
            return True
        is_arguments = key in (call.arguments, *_ARGUMENTS)
        if is_arguments and not self.begun and self._name is not None:
            if not self._begin(self._name, self._id):
                return False
            yield from self._json_arguments()
            return True
        parts: list[str] = []
        yield from json_steps.value(cursor, parts.append)
        if is_arguments:
            self._early = "".join(parts)
        return True

    def _json_arguments(self) -> Steps[None]:
        """One value, which is an object, a string that holds one, or nothing."""
        cursor, emit = self._cursor, self._emit
        first = yield from cursor.peek()
        if first == '"':
            size = self._num_chars
            yield from json_steps.string_text(cursor, emit)
            if self._num_chars == size:
                emit("{}")
        elif first == "n":
            parts: list[str] = []
            yield from json_steps.value(cursor, parts.append)
            emit("{}" if "".join(parts) == "null" else "".join(parts))
        else:
            yield from json_steps.value(cursor, emit)

    # --- calls with a name before the arguments ------------------------------------------------
    def _named_call(self, call: NamedCall) -> Steps[bool]:
        cursor = self._cursor
        words = _header_ends(call, self._calls.end)
        found = yield from cursor.until(words, _MAX_HEADER)
        if found is None:
            return False
        match = header_pattern(call.header).fullmatch(found[0].strip())
        if match is None:
            return False
        yield from cursor.take(call.header_end)
        groups = match.groupdict()
        call_id = groups.get("id") or (match.group() if "index" in groups else None)
        name = groups["name"]
        if name not in self._tools and not (yield from self._goes_on(call, found[1])):
            return False
        if not self._begin(name, call_id):
            return False
        match call.arguments:
            case JsonArguments():
                yield from self._json_arguments()
            case TaggedArguments():
                yield from self._tagged(call.arguments, name)
            case ValueArguments():
                yield from self._values(call.arguments)
        return True

    def _goes_on(self, call: NamedCall, word: str) -> Steps[bool]:
        """True if the name of an unknown tool is followed by arguments, or by the end of a call
        without any: prose about the markers of calls is not a call."""
        if isinstance(call.arguments, JsonArguments):
            return (yield from self._cursor.peek()) in '{"'
        if not isinstance(call.arguments, TaggedArguments):
            return True
        if not call.header_end.strip() and word in self._calls.end:
            return False  # only a name is between the markers
        cursor, start = self._cursor, self._cursor.at
        for marker in (call.arguments.key_begin, self._calls.end):
            found = yield from cursor.take(marker)
            cursor.at = start
            if found:
                return True
        return False

    def _tagged(self, tags: TaggedArguments, name: str) -> Steps[None]:
        cursor, emit = self._cursor, self._emit
        before = "{"
        while True:
            try:
                if not (yield from cursor.take(tags.key_begin)):
                    break
            except TextEndError:
                if cursor.is_cut:
                    raise
                break
            key_ends = (tags.key_end.split()[0],)
            found = yield from self._passing(cursor.until(key_ends, _MAX_KEY))
            if found is None:
                break
            told = yield from self._passing(self._key_end(tags))
            emit(f'{before}"{escaped(found[0].strip())}": ')
            before = ", "
            yield from self._tagged_value(tags, name, found[0].strip(), told)
        emit("{}" if before == "{" else "}")

    def _key_end(self, tags: TaggedArguments) -> Steps[bool | None]:
        """Passes it, with the white space behind it that is its own; whether the format says that a
        string follows."""
        cursor, marker, told = self._cursor, tags.key_end, None
        if tags.string_key_end is not None:
            told = yield from cursor.take(tags.string_key_end)
            marker = tags.string_key_end if told else marker
        if not told:
            before, typed, behind = marker.partition("{type}")
            yield from cursor.take(before)
            if typed:
                kind = yield from cursor.until((behind.split()[0],), _MAX_KEY)
                told = kind is not None and kind[0].strip() == "string"
                yield from cursor.take(behind)
        own = marker[len(marker.rstrip()) :]
        for char in own:
            while cursor.at == len(cursor.text):
                yield from cursor.more()
            if cursor.text[cursor.at] != char:
                break
            cursor.at += 1
        return told

    def _tagged_value(
        self, tags: TaggedArguments, name: str, key: str, told: bool | None
    ) -> Steps[None]:
        cursor, emit = self._cursor, self._emit
        ends, is_quoted = _value_ends(tags.value_end), False
        if tags.quotes is not None:
            is_quoted = yield from self._passing(cursor.take(tags.quotes[0]))
            ends = _value_ends(tags.quotes[1]) if is_quoted else ends
        if told or is_quoted or (told is None and is_string(self._tools, name, key)):
            emit('"')
            yield from self._value_text(tags, ends, lambda text: emit(escaped(text)))
            emit('"')
        else:
            parts: list[str] = []
            try:
                yield from self._value_text(tags, ends, parts.append)
            except TextEndError:
                emit("".join(parts))
                raise
            emit(json_of(self._tools, name, key, "".join(parts)))
        if is_quoted and tags.quotes is not None:
            yield from cursor.take(tags.quotes[1])
        yield from cursor.take(tags.value_end)

    def _value_text(
        self, tags: TaggedArguments, ends: Triggers, emit: Callable[[str], None]
    ) -> Steps[None]:
        """Gives the text of a value as it comes. A marker in it that neither another argument nor
        the end of the call follows is part of it: values are often code."""
        cursor = self._cursor
        while True:
            word = yield from passed_on(cursor, ends, emit)
            if (yield from self._ends_value(tags, word)):
                return
            emit(cursor.text[cursor.at])
            cursor.at += 1

    def _ends_value(self, tags: TaggedArguments, word: str) -> Steps[bool]:
        cursor, start = self._cursor, self._cursor.at
        try:
            yield from cursor.take(word)
            if word.strip() != tags.value_end.split()[0]:  # the end of quotes
                yield from cursor.take(tags.value_end)
            for follower in _followers(tags.key_begin, self._calls):
                if (yield from cursor.take(follower)):
                    return True
            return False
        except TextEndError:
            return True
        finally:
            cursor.at = start

    def _passing(self, steps: Steps[T]) -> Steps[T]:
        """Something between two arguments; at the end of the text a part of it is left out."""
        try:
            return (yield from steps)
        except TextEndError:
            self._cursor.at = len(self._cursor.text)
            raise

    def _values(self, syntax: ValueArguments) -> Steps[None]:
        cursor, emit = self._cursor, self._emit
        yield from cursor.take(syntax.begin)
        before = "{"
        while not (yield from cursor.take(syntax.end)):
            yield from cursor.take(syntax.separator)
            key_ends = (syntax.key_end.strip(), syntax.end)
            found = yield from self._passing(cursor.until(key_ends, _MAX_KEY))
            if found is None or found[1] == syntax.end:
                break
            yield from cursor.take(syntax.key_end)
            yield from cursor.space()
            key = found[0].strip().strip("\"'")
            emit(f'{before}"{escaped(key)}": ')
            before, start = ", ", cursor.at
            try:
                spelling = yield from tool_schemas.scan(cursor, syntax)
            except TextEndError:
                emit(cursor.text[start:])
                raise
            emit(tool_schemas.to_json(spelling, syntax))
        emit("{}" if before == "{" else "}")


def passed_on(cursor: Cursor, ends: Triggers, emit: Callable[[str], None]) -> Steps[str]:
    """Gives the text up to one of some words as it comes, and the word; it is not passed, nor is
    white space that belongs to it."""
    while True:
        found = ends.find(cursor)
        end = ends.safe_end(cursor) if found is None else found[0]
        if end > cursor.at:
            emit(cursor.text[cursor.at : end])
            cursor.at = end
        if found is not None:
            return found[1]
        cursor.trim()
        try:
            yield from cursor.more_after(ends.is_plain, emit)
        except TextEndError:
            emit(cursor.text[cursor.at :])
            cursor.at = len(cursor.text)
            raise


@lru_cache(256)
def header_pattern(header: str) -> re.Pattern[str]:
    """Returns a pattern that matches a header and finds its parts."""
    pattern = ""
    for part in re.split(r"(\{\w+\}|\s+)", header):
        if part == "{name}" and "(?P<name>" in pattern:
            pattern += "(?P=name)"
        elif part == "{index}":
            pattern += r"(?P<index>\d+)"
        elif part in ("{name}", "{id}"):
            pattern += rf"(?P<{part[1:-1]}>\S{{1,256}}?)"
        else:
            pattern += r"\s*" if part.isspace() else re.escape(part)
    return re.compile(pattern)


@lru_cache(256)
def _value_ends(marker: str) -> Triggers:
    """The first word of what ends a value, with and without the white space before it."""
    word = marker.split()[0]
    lead = marker[: len(marker) - len(marker.lstrip())]
    return Triggers((lead + word, word), with_space=False)


@lru_cache(256)
def _followers(key_begin: str, calls: Calls) -> tuple[str, ...]:
    """The words that may follow the end of a value."""
    return (key_begin.split()[0], *calls.end.split(), *calls.section_end.split())


@lru_cache(256)
def _header_ends(call: NamedCall, call_end: str) -> tuple[str, ...]:
    if call.header_end.strip():
        return (call.header_end.split()[0],)
    match call.arguments:
        case TaggedArguments(key_begin=key_begin):
            return tuple(word.split()[0] for word in (key_begin, call_end) if word.strip())
        case ValueArguments(begin=begin):
            return (begin,)
    return ("{",)
