"""Simpler definitions of tools, for templates that fail on what OpenAI's schema allows: a missing
description or parameters, several types, enums of values that are not strings.

Only the prompt shows the simpler form. Grammars and checks of calls keep what the client sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_SCHEMAS = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")


def tool_forms(tools: list[Any] | None) -> Iterator[list[Any] | None]:
    """The tools without fields that are null, with their optional fields, then with plain schemas.
    Forms that change nothing are left out."""
    last = tools if tools is None else [_without_nulls(tool) for tool in tools]
    yield last
    if not tools:
        return
    for form in (_filled, _simplified):
        found = [form(tool) for tool in tools]
        if found != last:
            yield found
            last = found


def _without_nulls(tool: Any) -> Any:
    """Fields that are null count as left out: most templates would print "None"."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    given = {key: value for key, value in function.items() if value is not None}
    if isinstance(schema := given.get("parameters"), Mapping):
        given["parameters"] = {key: value for key, value in schema.items() if value is not None}
    return {**tool, "function": given}


def _filled(tool: Any) -> Any:
    """The tool with a description and with parameters that have a type, properties and a list of
    those that are required."""
    tool = _without_nulls(tool)
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    given = dict(function)
    schema = given.get("parameters", {})
    if isinstance(schema, Mapping):
        given["parameters"] = {
            **schema,
            **{
                key: default
                for key, default in (("type", "object"), ("properties", {}), ("required", []))
                if schema.get(key) is None
            },
        }
    given.setdefault("description", "")
    return {**tool, "function": {key: given[key] for key in _order(given)}}


def _order(function: Mapping[str, Any]) -> list[str]:
    """Name, description and parameters first, in the usual order."""
    first = [key for key in ("name", "description", "parameters") if key in function]
    return first + [key for key in function if key not in first]


def _simplified(tool: Any) -> Any:
    filled = _filled(tool)
    function = filled.get("function") if isinstance(filled, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function["parameters"], Mapping):
        return filled
    schema = function["parameters"]
    plain = {
        **_inner_plain(schema),
        "type": "object",
        "properties": _plain_map(schema["properties"]),
        "required": [str(each) for each in schema["required"]],
    }
    return {**filled, "function": {**function, "parameters": plain}}


def _plain(schema: Any) -> dict[str, Any]:
    """A schema with one type, a description, and enums of text."""
    given = schema if isinstance(schema, Mapping) else {}
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


def _inner_plain(schema: Mapping[str, Any]) -> dict[str, Any]:
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
    if not isinstance(schemas, Mapping):
        return {}
    return {name: _plain(schema) for name, schema in schemas.items()}


def _one_type(schema: Any) -> str | None:
    """The first type other than null that a schema allows; None: it names none."""
    if not isinstance(schema, Mapping):
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
