"""Variants of conversations and tools for chat templates that reject the original form."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from vllmx_core.errors import TemplateError

_KEY, _VALUE = "zqkey", 'zq<"value'
_ARGUMENTS: dict[str, Any] = {_KEY: _VALUE, "zqother": [True, None]}
_ESCAPES = ("&#34;", "&quot;", "&#39;", "&lt;")
_ID = "zqcall001"
"""Some templates insist on nine letters and digits."""
_NAME = "zqname"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    _KEY: {"type": "string", "description": "d"},
                    "zqother": {"type": "array", "items": {}, "description": "d"},
                },
                "required": [],
            },
        },
    }
]

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""Renders messages with tools. Raises TemplateError."""


def takes_text_arguments(render: Render) -> bool:
    """True if a template writes calls correctly only with JSON text as arguments. Renders a call in
    one form or both."""
    as_object = _rendered(render, _ARGUMENTS)
    if as_object is not None and not _is_spoilt(as_object):
        return False
    as_text = _rendered(render, json.dumps(_ARGUMENTS))
    return as_text is not None and _holds_json(as_text) and not _is_spoilt(as_text)


def _rendered(render: Render, arguments: Any) -> str | None:
    """The conversation with one call; None where the template fails or leaves the call out."""
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "zquser"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "zqresult"},
    ]
    try:
        text = render(messages, _TOOLS)
    except TemplateError:
        return None
    called = text.rpartition("zquser")[2]
    return called if _KEY in called else None


def _is_spoilt(called: str) -> bool:
    """True if a call has HTML's escapes, or Python's form of the object."""
    return any(escape in called for escape in _ESCAPES) or str(_ARGUMENTS) in called


def _holds_json(called: str) -> bool:
    """True if the arguments appear as a JSON object."""
    decoder, at = json.JSONDecoder(), called.find('{"' + _KEY)
    while at >= 0:
        try:
            if decoder.raw_decode(called, at)[0] == _ARGUMENTS:
                return True
        except ValueError:
            pass
        at = called.find('{"' + _KEY, at + 1)
    return False


# --- conversations --------------------------------------------------------------------------------
Message = dict[str, Any]
Form = tuple[list[Message], list[Any] | None]
"""Messages and tools."""
_USUAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_PRINTED_PART = re.compile(r"\{'(type': 'text|text': )'")
"""The beginning of a part as Python prints it."""


def conversation_forms(messages: list[Message], tools: list[Any] | None) -> Iterator[Form]:
    """Messages and tools as they are, then more and more as templates may want them. Forms that
    change nothing are left out."""
    last: list[Message] = []
    for change in (list, _with_call_ids, _with_one_system, _with_lone_calls):
        messages = change(messages)
        if messages != last:
            yield from ((messages, each) for each in _tool_forms(tools))
        last = messages


def _with_call_ids(messages: list[Message]) -> list[Message]:
    """Gives the calls of checked messages ids of nine letters and digits, and their results the id
    and name of the call."""
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    waiting: list[str] = []
    found = []
    for index, message in enumerate(messages):
        copy = dict(message)
        if calls := message.get("tool_calls"):
            copy["tool_calls"] = []
            waiting = []
            for number, call in enumerate(calls):
                given = call.get("id") if isinstance(call.get("id"), str) else None
                made = _nine(given or f"{index}.{number}")
                ids[given or made] = made
                names[made] = call["function"]["name"]
                waiting.append(made)
                copy["tool_calls"].append({**call, "id": made})
        elif message["role"] == "tool":
            given = message.get("tool_call_id") or (waiting[0] if waiting else "")
            made = ids.get(given, given if given in names else _nine(given))
            if made in waiting:
                waiting.remove(made)
            copy["tool_call_id"] = made
            if not message.get("name") and made in names:
                copy["name"] = names[made]
        found.append(copy)
    return found


def _nine(given: str) -> str:
    """An id of nine letters and digits, the same for the same text."""
    if _USUAL_ID.fullmatch(given):
        return given
    digest = hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return base64.b32encode(digest).decode().lower()[:9]


def _with_one_system(messages: list[Message]) -> list[Message]:
    """One system message in place of several at the beginning."""
    is_system = [each["role"] in ("system", "developer") for each in messages]
    size = is_system.index(False) if False in is_system else len(messages)
    texts = [text_of(each["content"]) for each in messages[:size]]
    if size < 2 or None in texts:
        return messages
    joined = "\n\n".join(text for text in texts if text)
    return [{**messages[0], "content": joined}, *messages[size:]]


def _with_lone_calls(messages: list[Message]) -> list[Message]:
    """Each call in a turn of its own, with its result behind it, for templates that take one call
    in a turn. All have ids, by `_with_call_ids`."""
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        for number, call in enumerate(calls):
            turn = {**message, "tool_calls": [call]}
            found.append(turn if number == 0 else {**turn, "content": ""})
            own = next((each for each in results if each["tool_call_id"] == call["id"]), None)
            if own is not None:
                results.remove(own)
                found.append(own)
        found += results
    return found


def with_texts(messages: list[Message], prompt: str) -> list[Message] | None:
    """One text in place of the parts of a content that a template printed as Python does: some
    take parts from users alone. None where that changes nothing."""
    if _PRINTED_PART.search(prompt) is None:
        return None
    found = []
    for each in messages:
        text = text_of(each["content"]) if isinstance(each["content"], list) else None
        found.append(each if text is None else {**each, "content": text})
    return found if found != messages else None


def text_of(content: Any) -> str | None:
    """Returns a text, or the text of parts; None if a part is not text."""
    if not isinstance(content, list):
        return content or ""
    texts = [part.get("text") if part.get("type") == "text" else None for part in content]
    return "\n".join(text for text in texts if text) if None not in texts else None


# --- tools ----------------------------------------------------------------------------------------
_SCHEMAS = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_FIRST = ("name", "description", "parameters")
"""A function's fields in the usual order."""


def _tool_forms(tools: list[Any] | None) -> Iterator[list[Any] | None]:
    """The tools without fields that are null, with their optional fields, then with plain schemas.
    Forms that change nothing are left out."""
    if not tools:
        yield tools
        return
    last: list[Any] = []
    for change in (_without_nulls, _filled, _simplified):
        found = [_with_function(tool, change) for tool in last or tools]
        if found != last:
            yield found
        last = found


def _with_function(tool: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return {**tool, "function": change(function)} if isinstance(function, dict) else tool


def _without_nulls(function: dict[str, Any]) -> dict[str, Any]:
    """Fields that are null count as left out: most templates would print "None"."""
    given = {key: value for key, value in function.items() if value is not None}
    if isinstance(schema := given.get("parameters"), dict):
        given["parameters"] = {key: value for key, value in schema.items() if value is not None}
    return given


def _filled(function: dict[str, Any]) -> dict[str, Any]:
    """The function with a description and with parameters that have a type, properties and a list
    of those that are required."""
    given = {"description": "", "parameters": {}, **function}
    if isinstance(schema := given["parameters"], dict):
        defaults: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        lacking = {key: value for key, value in defaults.items() if key not in schema}
        given["parameters"] = {**schema, **lacking}
    return {key: given[key] for key in (*_FIRST, *given) if key in given}


def _simplified(function: dict[str, Any]) -> dict[str, Any]:
    schema = function["parameters"]
    if not isinstance(schema, dict):
        return function
    plain = {
        **_inner_plain(schema),
        "type": "object",
        "properties": _plain_map(schema["properties"]),
        "required": [str(each) for each in schema["required"]],
    }
    return {**function, "parameters": plain}


def _plain(schema: Any) -> dict[str, Any]:
    """A schema with one type, a description, and enums of text."""
    given = schema if isinstance(schema, dict) else {}
    found = _inner_plain({key: value for key, value in given.items() if value is not None})
    kind = _one_type(given)
    if kind is not None:
        found["type"] = kind
    if kind == "object":
        found.setdefault("additionalProperties", {})
    found.setdefault("description", "")
    if isinstance(found.get("enum"), list):
        found["enum"] = [_as_text(value) for value in found["enum"] if value is not None]
    if isinstance(found.get("default"), (bool, int, float)):
        found["default"] = _as_text(found["default"])
    return found


def _inner_plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy whose inner schemas are plain."""
    found = dict(schema)
    for key in _SCHEMAS:
        if key in found:
            found[key] = _plain(found[key])
    for key in _SCHEMA_LISTS:
        if isinstance(found.get(key), list):
            found[key] = [_plain(each) for each in found[key]]
    for key in _SCHEMA_MAPS:
        if key in found:
            found[key] = _plain_map(found[key])
    return found


def _plain_map(schemas: Any) -> dict[str, Any]:
    if not isinstance(schemas, dict):
        return {}
    return {name: _plain(schema) for name, schema in schemas.items()}


def _one_type(schema: Any) -> str | None:
    """The first type other than null that a schema allows; None: it names none."""
    if not isinstance(schema, dict):
        return None
    kinds = schema.get("type")
    if isinstance(kinds, list):
        kinds = next((kind for kind in kinds if kind != "null"), "null")
    if isinstance(kinds, str):
        return kinds
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        found = map(_one_type, parts) if isinstance(parts, list) else iter(())
        kind = next((each for each in found if each not in (None, "null")), None)
        if kind is not None:
            return kind
    return "string" if isinstance(schema.get("enum"), list) else None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
