"""The grammar of calls that must come, or must be right: a structural tag out of a format and the
tools of a request, which `vllmx_engine.grammar` makes into a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.output_format import (
    Calls,
    Channels,
    JsonArguments,
    JsonCall,
    NamedCall,
    OutputFormat,
    TaggedArguments,
    ValueArguments,
)

from vllmx_engine.formats.tool_schemas import Tools, schema_types

Form = dict[str, Any]
"""A part of a structural tag."""
_PLACEHOLDER = re.compile(r"(\{name\}|\{arguments\}|\{id\}|\{index\})")
_TYPES = ("array", "boolean", "null", "number", "object", "string")
_ANY: Form = {"type": "any_text"}


def must_call(made_of: OutputFormat, tools: Tools, *, one_call: bool = False) -> Form | None:
    """An answer of calls alone, after any reasoning; None where the
    format has no calls."""
    calls = _call_list(made_of, tools, one_call)
    if calls is None:
        return None
    if made_of.opened:
        return _form([_opened(made_of, tools, calls, one_call)])
    return _form([*_thoughts(made_of), *_empty_content(made_of), calls])


def tells_calls(made_of: OutputFormat) -> bool:
    """True if a marker begins each call, so that `may_call` has a grammar."""
    if made_of.channels is not None:
        return True
    return made_of.calls is not None and not (made_of.calls.is_bare or made_of.opened)


def may_call(made_of: OutputFormat, tools: Tools, *, one_call: bool = False) -> Form | None:
    """Any answer whose calls, once they begin, are calls of the tools as their schemas say; None
    where nothing tells that they begin."""
    if made_of.channels is not None:
        return _form([_messages(made_of.channels), _last_message(made_of.channels, tools)])
    calls = made_of.calls
    if calls is None or not tells_calls(made_of):
        return None
    if calls.section_begin:
        section = _call_list(made_of, tools, one_call)
        assert section is not None
        tags = [section["elements"][0] if section["type"] == "sequence" else section]
    else:
        tags = [_call_tag(calls, name, schema) for name, schema in tools.items()]
    free = {
        "type": "triggered_tags",
        "triggers": [calls.trigger],
        "tags": tags,
        "stop_after_first": one_call,
    }
    return _form([*_thoughts(made_of), *_content(made_of), free])


def _form(elements: Sequence[Form]) -> Form:
    return {"format": _sequence(*elements)}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _either(options: Iterable[Form]) -> Form:
    return {"type": "or", "elements": list(options)}


def _one_text(texts: Iterable[str]) -> Form:
    return _either(map(_text, texts))


def _tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _optional(form: Form) -> Form:
    return _either([form, _text("")])


def _schema(schema: Mapping[str, Any]) -> Form:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _thoughts(made_of: OutputFormat) -> Iterator[Form]:
    """The model may think before it calls."""
    if made_of.channels is not None:
        each = made_of.channels
        begin = each.channel + each.thinking + each.message
        end = each.ends[0] + each.start + "assistant"
        yield _optional(_tag(begin, _ANY, end))
    elif made_of.thinking is not None and made_of.thinking.begin.strip():
        begin, end = made_of.thinking.begin, made_of.thinking.end
        # what models write behind the marker varies
        blank = {"type": "regex", "pattern": r"\s{0,4}"}
        yield _optional(_sequence(_tag(begin.strip(), _ANY, end.strip()), blank))


def _content(made_of: OutputFormat) -> Iterator[Form]:
    """Content with its marks, which may be special tokens, as no free text has any. The prompt may
    have the first one."""
    if made_of.content_begin.strip():
        begin, end = made_of.content_begin.strip(), made_of.content_end.strip()
        begins = (begin, "") if made_of.always_content else (begin,)
        tags = [_tag(each, _ANY, end) for each in begins]
        yield _optional(tags[0] if len(tags) == 1 else _either(tags))


def _empty_content(made_of: OutputFormat) -> Iterator[Form]:
    """The marks of a content that says nothing, where answers always have one."""
    if made_of.always_content:
        yield _optional(_text(made_of.content_begin.strip()))
        yield _optional(_text(made_of.content_end.strip()))


def _opened(made_of: OutputFormat, tools: Tools, calls: Form, one_call: bool) -> Form:
    """Calls whose first message the prompt has begun, or that of thoughts before them."""
    thinking, written = made_of.thinking, made_of.calls
    assert written is not None
    first = replace(
        written,
        section_begin=written.section_begin.removeprefix(made_of.opened),
        begin=written.begin
        if written.section_begin
        else written.begin.removeprefix(made_of.opened),
    )
    at_once = [_either(_tags(first, tools))]
    if written.section_begin:
        at_once = [_call_list(replace(made_of, calls=first), tools, one_call) or _text("")]
    elif not one_call:
        at_once.append(_optional(_sequence(_text(written.separator), calls)))
    if thinking is None:
        return _sequence(*at_once)
    begin, end = made_of.thinking_begin.strip(), thinking.end.strip()
    return _either([_sequence(*at_once), _sequence(_tag(begin, _ANY, end), calls)])


def _messages(channels: Channels) -> Form:
    """Messages that go before the last one of an answer."""
    end = channels.ends[0] + channels.start + "assistant"
    names = (channels.thinking, channels.calls, channels.content)
    tags = [_tag(channels.channel + name + channels.message, _ANY, end) for name in names]
    return {"type": "tags_with_separator", "tags": tags, "separator": ""}


def _last_message(channels: Channels, tools: Tools) -> Form:
    """A text, or one call, whose header has its parts in one of the orders that models write."""
    names = (channels.thinking, channels.calls, channels.content)
    texts = [channels.channel + name + channels.message for name in names]
    kinds = (f" {channels.constrain}json", f"{channels.constrain}json", " json", "")
    forms = [_sequence(_one_text(texts), _ANY)]
    for tool, schema in tools.items():
        recipient = channels.recipient + tool
        headers = [
            channels.channel + name + recipient for name in (channels.calls, channels.thinking)
        ]
        headers.append(recipient + channels.channel + channels.calls)
        call = (_text(channels.message), _schema(_object(schema)), _text(channels.ends[-1]))
        forms.append(_sequence(_one_text(headers), _one_text(kinds), *call))
    return _either(forms)


def _call_list(made_of: OutputFormat, tools: Tools, one_call: bool) -> Form | None:
    if made_of.channels is not None:
        each = made_of.channels
        header = f"{each.channel}{each.calls}{each.recipient}{{name}} {each.constrain}json"
        call = NamedCall(JsonArguments(), header, each.message)
        return _either(_tags(Calls(call, end=each.ends[-1]), tools))
    calls = made_of.calls
    if calls is None:
        return None
    several = {
        "type": "tags_with_separator",
        "tags": _tags(calls, tools),
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": one_call,
    }
    if not calls.section_begin:
        return several
    return _sequence(_tag(calls.section_begin, several, calls.section_end))


def _tags(calls: Calls, tools: Tools) -> list[Form]:
    return [_call_tag(calls, name, schema) for name, schema in tools.items()]


def _call_tag(calls: Calls, name: str, schema: Mapping[str, Any]) -> Form:
    """One call of one tool."""
    elements = _joined([_text(calls.begin), *_call(calls.call, name, schema), _text(calls.end)])
    begin = elements.pop(0)["value"] if elements[0]["type"] == "const_string" else ""
    last = elements.pop()["value"] if elements and elements[-1]["type"] == "const_string" else ""
    return _tag(begin, _sequence(*elements or [_text("")]), last)


def _joined(elements: Sequence[Form]) -> list[Form]:
    """Neighbouring texts are one."""
    found: list[Form] = []
    for element in elements:
        is_text = element["type"] == "const_string"
        if is_text and found and found[-1]["type"] == "const_string":
            found[-1] = _text(found[-1]["value"] + element["value"])
        else:
            found.append(element)
    return found


def _call(call: JsonCall | NamedCall, name: str, schema: Mapping[str, Any]) -> Iterator[Form]:
    if isinstance(call, JsonCall):
        yield from _spelt(call.spelling, name, [_schema(_object(schema))])
        return
    yield from _spelt(call.header + call.header_end, name, [])
    match call.arguments:
        case JsonArguments(as_string=False):
            yield _schema(_object(schema))
        case JsonArguments():
            yield _schema({"type": "string"})
        case TaggedArguments() as tags:
            yield from _tagged(tags, _object(schema))
        case ValueArguments() as syntax:
            yield _text(syntax.begin)
            yield from _values(syntax, _object(schema))
            yield _text(syntax.end)


def _spelt(spelling: str, name: str, arguments: Sequence[Form]) -> Iterator[Form]:
    for part in _PLACEHOLDER.split(spelling):
        match part:
            case "{name}":
                yield _text(json.dumps(name, ensure_ascii=False)[1:-1])
            case "{arguments}":
                yield from arguments
            case "{id}":
                yield {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"}
            case "{index}":
                yield {"type": "regex", "pattern": "[0-9]{1,3}"}
            case _:
                yield _text(part)


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "type": "object"}


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Lists each property: name, schema with what it refers to, whether it must be there."""
    required = schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = schema.get("properties") or {}
    return [
        (key, {**shared, **(each if isinstance(each, dict) else {})}, key in required)
        for key, each in found.items()
    ]


def _tagged(tags: TaggedArguments, schema: Mapping[str, Any]) -> Iterator[Form]:
    for key, each, is_required in _properties(schema):
        argument = _tagged_one(tags, key, each)
        yield argument if is_required else _optional(argument)


def _tagged_one(tags: TaggedArguments, key: str, schema: Mapping[str, Any]) -> Form:
    if "{type}" in tags.key_end:
        return _typed_one(tags, key, schema)
    is_text = _is_text(schema)
    key_end = tags.string_key_end if is_text and tags.string_key_end else tags.key_end
    begin = tags.key_begin + key + key_end
    if is_text and not _values_of(schema):
        return _tag(begin, _ANY, tags.value_end)
    value = _one_text(_values_of(schema)) if is_text else _schema(schema)
    return _sequence(_text(begin), value, _text(tags.value_end))


def _typed_one(tags: TaggedArguments, key: str, schema: Mapping[str, Any]) -> Form:
    """An argument whose type is written before its value: one form for each that it may have."""
    types = schema_types(schema) or set(_TYPES)
    forms = []
    for kind in sorted({"number" if each == "integer" else each for each in types}):
        typed = replace(tags, key_end=tags.key_end.replace("{type}", kind))
        allowed = "integer" if kind == "number" and "number" not in types else kind
        one = schema if kind == "string" and _values_of(schema) else {**schema, "type": allowed}
        forms.append(_tagged_one(typed, key, one))
    return forms[0] if len(forms) == 1 else _either(forms)


def _is_text(schema: Mapping[str, Any]) -> bool:
    """True if a value is written as plain text, not as JSON."""
    kind = schema.get("type")
    return kind == "string" or bool(_values_of(schema))


def _values_of(schema: Mapping[str, Any]) -> list[str]:
    """The texts that a value may be, where they are listed."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    are_texts = isinstance(values, list) and all(isinstance(each, str) for each in values)
    return values if are_texts else []


def _values(syntax: ValueArguments, schema: Mapping[str, Any]) -> Iterator[Form]:
    """Arguments that must be there first, each other one behind a separator."""
    given = sorted(_properties(schema), key=lambda each: not each[2])
    each = [(_value(syntax, key, one), required) for key, one, required in given]
    yield from _separated(each, syntax.separator, is_first=True)


def _separated(each: list[tuple[Form, bool]], separator: str, *, is_first: bool) -> Iterator[Form]:
    for number, (form, is_required) in enumerate(each):
        if is_first and not is_required:
            rest = list(_separated(each[number + 1 :], separator, is_first=False))
            later = list(_separated(each[number + 1 :], separator, is_first=True))
            yield _either([_sequence(form, *rest), _sequence(*later) if later else _text("")])
            return
        if is_first:
            yield form
        else:
            behind = _sequence(_text(separator), form)
            yield behind if is_required else _optional(behind)
        is_first = False


def _value(syntax: ValueArguments, key: str, schema: Mapping[str, Any]) -> Form:
    begin = _text(key + syntax.key_end)
    kind = schema.get("type")
    value: Form = _schema(schema)
    if kind == "string" and not syntax.escapes and not _values_of(schema):
        value = _tag(syntax.quote, _ANY, syntax.quote)
    elif _values_of(schema):
        quoted = [
            json.dumps(each, ensure_ascii=False)
            if syntax.escapes
            else syntax.quote + each + syntax.quote
            for each in _values_of(schema)
        ]
        value = _one_text(quoted)
    elif kind == "boolean" and syntax.python:
        value = _one_text(("True", "False"))
    return _sequence(begin, value)
