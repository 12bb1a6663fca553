"""Writes calls as a model would, to prove that a format is a model's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_core.output_format import (
    Calls,
    JsonArguments,
    JsonCall,
    NamedCall,
    TaggedArguments,
    ValueArguments,
)
from vllmx_core.records import Record

from vllmx_engine.grammar.parts import type_of


def json_text(value: Any, is_compact: bool) -> str:
    """JSON with or without a space behind commas and colons; letters stay as they are."""
    separators = (",", ":") if is_compact else (", ", ": ")
    return json.dumps(value, ensure_ascii=False, separators=separators)


class WrittenCall(Record):
    """A call to be written."""

    name: str
    arguments: Mapping[str, Any]
    id: str = "call00001"


def write_calls(made_of: Calls, calls: Sequence[WrittenCall]) -> str:
    """The calls with all of their markers."""
    written = [
        made_of.begin + _write_call(made_of, call, index) + made_of.end
        for index, call in enumerate(calls)
    ]
    return made_of.section_begin + made_of.separator.join(written) + made_of.section_end


def _write_call(made_of: Calls, call: WrittenCall, index: int) -> str:
    if isinstance(made_of.call, JsonCall):
        arguments = json_text(call.arguments, made_of.is_compact)
        return _filled(made_of.call.spelling, call, index).replace("{arguments}", arguments)
    head = _filled(made_of.call.header, call, index) + made_of.call.header_end
    return head + _write_arguments(made_of, made_of.call, call.arguments)


def _filled(spelling: str, call: WrittenCall, index: int) -> str:
    found = spelling.replace("{name}", call.name).replace("{index}", str(index))
    return found.replace("{id}", call.id)


def _write_arguments(made_of: Calls, call: NamedCall, arguments: Mapping[str, Any]) -> str:
    match call.arguments:
        case JsonArguments(as_string):
            text = json_text(arguments, made_of.is_compact)
            return json.dumps(text, ensure_ascii=False) if as_string else text
        case TaggedArguments() as tags:
            return "".join(_tagged(tags, key, arguments[key]) for key in arguments)
        case ValueArguments() as syntax:
            each = [f"{key}{syntax.key_end}{_value(arguments[key], syntax)}" for key in arguments]
            return syntax.begin + syntax.separator.join(each) + syntax.end


def _tagged(tags: TaggedArguments, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    key_end = tags.string_key_end if is_text and tags.string_key_end else tags.key_end
    text = value if is_text else json_text(value, is_compact=False)
    if is_text and tags.quotes is not None and ("<" in text or "\n" in text):
        text = text.join(tags.quotes)
    key_end = key_end.replace("{type}", type_of(value))
    return tags.key_begin + key + key_end + text + tags.value_end


def _value(value: Any, syntax: ValueArguments) -> str:
    if isinstance(value, str):
        if not syntax.escapes:
            return syntax.quote + value + syntax.quote
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + syntax.separator.join(_value(item, syntax) for item in value) + "]"
    if isinstance(value, Mapping):
        colon = ": " if syntax.python else syntax.key_end
        each = [
            f"{_value(key, syntax) if syntax.python else key}{colon}{_value(value[key], syntax)}"
            for key in value
        ]
        return "{" + syntax.separator.join(each) + "}"
    return repr(value) if syntax.python else json.dumps(value)
