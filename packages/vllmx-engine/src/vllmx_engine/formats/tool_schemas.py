"""What the schemas of a request's tools say about arguments that a format writes without types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from vllmx_core.output_format import ValueArguments

from vllmx_engine.formats.values import to_json

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
    """Whether an argument can only be a string, so that it may be passed on as it comes."""
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
