"""Checks that the keywords of a JSON schema have values of the right kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.bounds import is_number

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0 and float(value).is_integer()


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _maps_to(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(
            any(kind(each) for kind in kinds) for each in value.values()
        )

    return holds


Kind = tuple[str, Callable[[Any], bool]]
_SIZE: Kind = ("a whole number of at least 0", _is_size)
_NUMBER: Kind = ("a number", is_number)
_BOUND: Kind = (
    "a number, or true or false",
    lambda value: isinstance(value, bool) or is_number(value),
)
_TEXT: Kind = ("a string", _is_text)
_SCHEMA: Kind = ("a schema", _is_schema)
_SCHEMAS: Kind = ("a list of at least one schema", _are_schemas)
_SCHEMA_MAP: Kind = ("an object of schemas", _maps_to(_is_schema))
KINDS: Mapping[str, Kind] = {
    "type": (f"one of {', '.join(TYPES)}, or a list of them", _is_type),
    "enum": ("a list of values", lambda value: isinstance(value, list)),
    "pattern": _TEXT,
    "format": _TEXT,
    "$ref": _TEXT,
    "required": ("a list of strings", _are_texts),
    "multipleOf": ("a number above 0", lambda value: is_number(value) and value > 0),
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _SIZE),
    **dict.fromkeys(("minProperties", "maxProperties"), _SIZE),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _SCHEMA),
    **dict.fromkeys(("anyOf", "allOf", "oneOf"), _SCHEMAS),
    "prefixItems": ("a list of schemas", lambda value: value == [] or _are_schemas(value)),
    "items": ("a schema", lambda value: _is_schema(value) or value == [] or _are_schemas(value)),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _SCHEMA_MAP),
    **dict.fromkeys(("$defs", "definitions"), _SCHEMA_MAP),
    "dependentRequired": ("an object of lists of strings", _maps_to(_are_texts)),
    "dependencies": ("an object of lists of strings and schemas", _maps_to(_are_texts, _is_schema)),
}


def check_kinds(schema: Mapping[str, Any], path: str) -> None:
    """Raises GrammarError for a keyword of a schema, not of its parts, with a value of another
    kind."""
    for keyword, value in schema.items():
        name, holds = KINDS.get(keyword, ("", None))
        if holds is not None and not holds(value):
            raise GrammarError(f"{keyword} at {path} must be {name}, got {shown(value)}")
