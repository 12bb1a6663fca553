"""JSON schemas as trees: their parts with their places, references, types and listed values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from vllmx_core.errors import GrammarError

Schema = dict[str, Any]
ANNOTATIONS = frozenset(
    (
        *("title", "description", "$comment", "examples", "default", "deprecated", "readOnly"),
        *("writeOnly", "example", "discriminator", "nullable", "xml", "externalDocs"),
    )
)
"""Keywords that hold no value to anything, those of OpenAPI among them."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_HELD = (
    *_MAPS,
    *("anyOf", "allOf", "oneOf", "prefixItems"),
    *("items", "additionalProperties", "additionalItems", "contains"),
)
"""Keywords whose schemas hold a part of the value."""
PARTS = (*_HELD, "not", "if", "then", "else", "propertyNames")
"""All keywords that have schemas."""
_TYPES = ("null", "boolean", "object", "array", "string", "number")
_MAX_REFERENCES = 8
"""The most references that lead to each other."""


class NothingLeftError(GrammarError):
    """A schema allows no value at all. Where it may be left out, it is."""


# --- parts ----------------------------------------------------------------------------------------
def all_parts(schema: Any, path: str = "#") -> Iterator[tuple[str, Schema]]:
    """A schema and all schemas in it, with their places."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key in PARTS:
        part, where = schema.get(key), f"{path}/{key}"
        if isinstance(part, list):
            for number, each in enumerate(part):
                yield from all_parts(each, f"{where}/{number}")
        elif key in _MAPS and isinstance(part, dict):
            for name, each in part.items():
                yield from all_parts(each, f"{where}/{name}")
        else:
            yield from all_parts(part, where)


def with_parts(schema: Schema, path: str, change: Callable[[Any, str], Any]) -> Schema:
    """The schema with each schema that holds a part of the value changed."""
    found = dict(schema)
    for key in _HELD:
        part, where = schema.get(key), f"{path}/{key}"
        if isinstance(part, list):
            found[key] = [change(each, f"{where}/{n}") for n, each in enumerate(part)]
        elif key in _MAPS and isinstance(part, dict):
            found[key] = {name: change(each, f"{where}/{name}") for name, each in part.items()}
        elif isinstance(part, dict):
            found[key] = change(part, where)
    return found


def add_choice(schema: Schema, options: list[Any]) -> None:
    """Holds a schema to one of some others."""
    schema["allOf"] = [*(schema.get("allOf") or ()), {"anyOf": options}]


# --- references -----------------------------------------------------------------------------------
def references(schema: Any) -> set[str]:
    """All references of a schema into itself."""
    if isinstance(schema, list):
        return set[str]().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    found = references(list(schema.values()))
    own = schema.get("$ref")
    return found | {own} if isinstance(own, str) and own.startswith("#/") else found


def referred(root: Schema, reference: str) -> Any:
    """Returns the target of a reference into a schema (`#`, `#/...`); None if it has none."""
    found: Any = root
    for part in unquote(reference).split("/")[1:]:
        name = _unescaped(part)
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


def resolved(root: Schema, schema: Any) -> Any:
    """Returns a reference's target, or the schema itself; None for a reference without a target."""
    for _ in range(_MAX_REFERENCES):
        if not (isinstance(schema, dict) and set(schema) == {"$ref"}):
            return schema
        reference = schema["$ref"]
        schema = referred(root, reference) if str(reference).startswith("#/") else None
    return None


def place_of_reference(reference: str) -> str:
    """The place that a reference leads to, as messages write it."""
    return _unescaped(unquote(reference))


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


# --- values ---------------------------------------------------------------------------------------
def own_types(schema: Schema) -> list[str]:
    """The types that a schema names; all of them where it names none."""
    named = schema.get("type", _TYPES)
    return [named] if isinstance(named, str) else list(named)


def values_of(schema: Schema) -> list[Any] | None:
    """All that a schema allows, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def type_of(value: Any) -> str:
    """The name of a value's type; whole numbers are numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def types_of_value(value: Any) -> set[str]:
    """The names of all types that a value has: whole numbers are integers, too."""
    name = type_of(value)
    is_whole = name == "number" and (isinstance(value, int) or value.is_integer())
    return {name, "integer"} if is_whole else {name}


def equal(one: Any, another: Any) -> bool:
    """Equality as JSON has it: 1 is 1.0, and true is not 1."""
    return bool(one == another) and type_of(one) == type_of(another)


def is_among(value: Any, others: list[Any]) -> bool:
    """True if one of several values is equal."""
    return any(equal(value, other) for other in others)
