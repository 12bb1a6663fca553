"""Types of tools' parameters, and the values that answers write for them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllmx_core.output_format import ValueArguments

from vllmx_engine.formats.cursor import Cursor, Steps

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_MAX_DEPTH = 64


def scan(cursor: Cursor, syntax: ValueArguments) -> Steps[str]:
    """Passes one value and gives its spelling; it ends before a separator or the end of the
    arguments."""
    start, depth = cursor.at, 0
    ends = {syntax.separator.strip()[:1], syntax.end[:1]}
    quotes = _quotes(syntax)
    while True:
        quote = yield from _quote_here(cursor, quotes)
        if quote:
            yield from _pass_string(cursor, quote, syntax.escapes)
            continue
        if cursor.at == len(cursor.text):
            yield from cursor.more()
            continue
        char = cursor.text[cursor.at]
        if depth == 0 and char in ends:
            return cursor.text[start : cursor.at].strip()
        depth += (char in "[{(") - (char in "]})")
        cursor.at += 1


def _quotes(syntax: ValueArguments) -> tuple[str, ...]:
    return ("'", '"') if syntax.python else (syntax.quote,)


def _quote_here(cursor: Cursor, quotes: tuple[str, ...]) -> Steps[str]:
    """The quote at the place, if one is there."""
    for quote in quotes:
        while True:
            here = cursor.text[cursor.at : cursor.at + len(quote)]
            if here == quote:
                return quote
            if not here or not quote.startswith(here):
                break
            yield from cursor.more()
    return ""


def _pass_string(cursor: Cursor, quote: str, escapes: bool) -> Steps[None]:
    cursor.at += len(quote)
    while True:
        at = cursor.at
        if cursor.text.startswith(quote, at):
            cursor.at += len(quote)
            return
        if len(cursor.text) - at < max(2, len(quote)):
            yield from cursor.more()
        else:
            cursor.at += 2 if escapes and cursor.text[at] == "\\" else 1


def to_json(text: str, syntax: ValueArguments) -> str:
    """Returns a complete value as JSON. Text outside the notation becomes a string."""
    try:
        parser = _Parser(text, syntax)
        value = parser.value(0)
        parser.finish()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)
    return value


class _Parser:
    """Makes JSON of a value, whose numbers keep their spelling."""

    def __init__(self, text: str, syntax: ValueArguments) -> None:
        self._text = text
        self._at = 0
        self._quotes = _quotes(syntax)
        self._escapes = syntax.escapes

    def finish(self) -> None:
        self._space()
        if self._at != len(self._text):
            raise ValueError

    def value(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise ValueError
        self._space()
        char = self._text[self._at : self._at + 1]
        if char == "{":
            return self._members("}", depth, keyed=True)
        if char == "[":
            return self._members("]", depth, keyed=False)
        quoted = self._quoted()
        if quoted is not None:
            return json.dumps(quoted, ensure_ascii=False)
        word = self._word(",]}")
        if _NUMBER.fullmatch(word):
            return word
        return json.dumps(_WORDS.get(word, word), ensure_ascii=False)

    def _members(self, close: str, depth: int, *, keyed: bool) -> str:
        self._at += 1
        members: list[str] = []
        while True:
            self._space()
            if self._text.startswith(close, self._at):
                self._at += 1
                break
            if members and not self._pass(","):
                raise ValueError
            self._space()
            if self._text.startswith(close, self._at):
                continue  # a comma behind the last one
            key = f"{self._key()}: " if keyed else ""
            members.append(key + self.value(depth + 1))
        inner = ", ".join(members)
        return f"{{{inner}}}" if keyed else f"[{inner}]"

    def _key(self) -> str:
        quoted = self._quoted()
        key = self._word(":") if quoted is None else quoted
        if not self._pass(":"):
            raise ValueError
        return json.dumps(key, ensure_ascii=False)

    def _word(self, ends: str) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            self._at += 1
        word = self._text[start : self._at].strip()
        if not word:
            raise ValueError
        return word

    def _quoted(self) -> str | None:
        quote = next((q for q in self._quotes if self._text.startswith(q, self._at)), None)
        if quote is None:
            return None
        start, at = self._at, self._at + len(quote)
        while not self._text.startswith(quote, at):
            if at >= len(self._text):
                raise ValueError
            at += 2 if self._escapes and self._text[at] == "\\" else 1
        self._at = at + len(quote)
        if self._escapes:
            value: Any = ast.literal_eval(_one_line(self._text[start : self._at]))
            return re.sub("[\ud800-\udfff]", "\ufffd", value) if isinstance(value, str) else None
        return self._text[start + len(quote) : at]

    def _pass(self, char: str) -> bool:
        self._space()
        if not self._text.startswith(char, self._at):
            return False
        self._at += 1
        return True

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1


def _one_line(text: str) -> str:
    """A string literal whose line breaks are escapes, as Python wants them."""
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")


PYTHON = ValueArguments("(", "=", ", ", ")")
Tools = Mapping[str, Mapping[str, Any]]
"""Schema of the arguments by the name of a tool."""


def tools_by_name(tools: Iterable[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Tools of OpenAI's definitions with a name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return found


def is_string(tools: Tools, name: str, key: str) -> bool:
    """True if an argument can only be a string, so that it may be passed on as it arrives."""
    return schema_types(_property(tools, name, key)) == {"string"}


def json_of(tools: Tools, name: str, key: str, text: str) -> str:
    """A complete value as JSON: as it is where it is JSON of a type that the schema allows, else as
    a string."""
    types = schema_types(_property(tools, name, key))
    try:
        value = json.loads(text.strip(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        if text.strip()[:1] in ("{", "[") and (not types or types & {"object", "array"}):
            return to_json(text.strip(), PYTHON)
        value = _python_word(text.strip(), types)
    if isinstance(value, str) or (types and not _types_of(value) & types):
        return json.dumps(text, ensure_ascii=False)
    return text.strip() if text.strip() not in ("True", "False", "None") else json.dumps(value)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _python_word(text: str, types: set[str]) -> Any:
    words = {"True": True, "False": False, "None": None}
    return words[text] if text in words and types - {"string"} else text


def _property(tools: Tools, name: str, key: str) -> Any:
    properties = tools.get(name, {}).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def schema_types(schema: Any, depth: int = 0) -> set[str]:
    """Names of the types that a schema allows at its top; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list):
        return {each for each in found if isinstance(each, str)}
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return set().union(*(_types_of(value) for value in values))
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts:
            each = [schema_types(part, depth + 1) for part in parts]
            return set().union(*each) if all(each) else set()
    return set()


def _types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}
