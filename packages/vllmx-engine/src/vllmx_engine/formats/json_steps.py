"""JSON read while it comes. Values keep their own spelling, so that pieces of a value, joined, are
what the model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from vllmx_engine.formats.cursor import Cursor, Steps, TextEndError

_OUTSIDE = re.compile(r'[^"{}\[\]]+')
_INSIDE = re.compile(r'[^"\\]+')
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+').fullmatch
_CONTROL = re.compile(r"[\x00-\x1f]")
_SCALAR = re.compile(r"[^\s,\]}:]*")
_ESCAPED = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])")
_MAX_NAME = 4096


def escaped(text: str) -> str:
    """Returns a text as the quotes of a JSON string hold it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def string(cursor: Cursor) -> Steps[str | None]:
    """The text of a JSON string of moderate length; None where there is none."""
    if (yield from cursor.peek()) != '"':
        return None
    parts: list[str] = []
    complete = yield from string_text(cursor, parts.append)
    text = "".join(parts)
    return text if complete and len(text) <= _MAX_NAME else None


def string_text(cursor: Cursor, emit: Callable[[str], None]) -> Steps[bool]:
    """Passes a JSON string and gives its text, unescaped, as it comes. False at an escape that is
    none."""
    cursor.at += 1
    while True:
        if cursor.at == len(cursor.text):
            cursor.trim()
            yield from cursor.more()
            continue
        match = _INSIDE.match(cursor.text, cursor.at)
        if match is not None:
            emit(match.group())
            cursor.at = match.end()
        elif cursor.text[cursor.at] == '"':
            cursor.at += 1
            return True
        else:
            text = yield from _escape(cursor)
            if text is None:
                return False
            emit(text)


def _escape(cursor: Cursor) -> Steps[str | None]:
    """One escape, or two that make one character."""
    match = yield from _complete_escape(cursor, cursor.at)
    if match is None:
        return None
    raw = match.group()
    if raw[:4].lower() in ("\\ud8", "\\ud9", "\\uda", "\\udb"):
        second = yield from _complete_escape(cursor, match.end())
        if second is not None and second.group()[:4].lower() in (
            "\\udc",
            "\\udd",
            "\\ude",
            "\\udf",
        ):
            match, raw = second, raw + second.group()
    try:
        text: str = json.loads(f'"{raw}"')
    except ValueError:
        return None
    cursor.at = match.end()
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _complete_escape(cursor: Cursor, start: int) -> Steps[re.Match[str] | None]:
    while len(cursor.text) < start + 6:
        match = _ESCAPED.match(cursor.text, start)
        if match is not None or not "\\uffff".startswith(cursor.text[start : start + 2]):
            return match
        try:
            yield from cursor.more()
        except TextEndError:
            return None
    return _ESCAPED.match(cursor.text, start)


def value(cursor: Cursor, emit: Callable[[str], None]) -> Steps[None]:
    """Passes one value of any kind and gives its spelling as it comes. Only its end is looked for;
    control characters in strings, which some models write, are escaped."""
    first = yield from cursor.peek()
    if first in "{[":
        yield from _nested(cursor, emit)
    elif first == '"':
        emit('"')
        cursor.at += 1
        yield from _raw_string(cursor, emit)
    else:
        while True:
            match = _SCALAR.match(cursor.text, cursor.at)
            assert match is not None
            emit(match.group())
            cursor.at = match.end()
            if cursor.at < len(cursor.text):
                return
            yield from cursor.more()


def _nested(cursor: Cursor, emit: Callable[[str], None]) -> Steps[None]:
    depth = 0
    while True:
        text, start = cursor.text, cursor.at
        while cursor.at < len(text):
            char = text[cursor.at]
            match = _OUTSIDE.match(text, cursor.at)
            if match is not None:
                cursor.at = match.end()
                continue
            cursor.at += 1
            if char == '"':
                emit(text[start : cursor.at])
                yield from _raw_string(cursor, emit)
                text, start = cursor.text, cursor.at
                continue
            depth += 1 if char in "{[" else -1
            if depth == 0:
                emit(text[start : cursor.at])
                return
        if cursor.at > start:
            emit(text[start : cursor.at])
        cursor.trim()
        yield from cursor.more()


def _raw_string(cursor: Cursor, emit: Callable[[str], None]) -> Steps[None]:
    """The rest of a string behind its first quote, as it is spelt."""
    while True:
        if cursor.at == len(cursor.text):
            cursor.trim()
            yield from cursor.more_after(_PLAIN, emit)
            continue
        match = _INSIDE.match(cursor.text, cursor.at)
        if match is not None:
            emit(_CONTROL.sub(lambda found: escaped(found[0]), match[0]))
            cursor.at = match.end()
        elif cursor.text[cursor.at] == '"':
            emit('"')
            cursor.at += 1
            return
        elif cursor.at + 1 < len(cursor.text):
            emit(cursor.text[cursor.at : cursor.at + 2])
            cursor.at += 2
        else:
            yield from cursor.more()
