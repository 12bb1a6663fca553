"""Keywords of JSON schemas: the kinds of their values, and bounds of numbers and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.parts import Schema

SIZES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST_FRACTION = 100
"""Fractions lie between this and its negative: each gap between two integers is a schema of its
own."""

_MOST, _LEAST = 9e18, 1e-60
"""The library counts with 64 bits, and writes a digit of a fraction as a group in a group."""
_MOST_EXACT = 1 << 53
"""Floats skip whole numbers beyond it."""


def is_number(value: Any) -> TypeGuard[float]:
    """True if a value is a finite number."""
    is_any = isinstance(value, int | float) and not isinstance(value, bool)
    return is_any and -math.inf < value < math.inf


def narrow(schema: Schema) -> None:
    """Moves bounds that the library cannot count with into the interval, to the next it can."""
    for keyword in NUMBER:
        bound, is_low = schema.get(keyword), keyword in NUMBER[::2]
        if is_number(bound) and not (_LEAST <= abs(bound) <= _MOST_EXACT or bound == 0):
            schema[keyword] = _next_above(bound) if is_low else -_next_above(-bound)


def check_bounds(schema: Schema, path: str) -> None:
    """Refuses bounds that the library gets wrong: between two whole numbers it takes a lower bound
    that is whole, or an upper one below zero, as allowed although it is excluded."""
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    for bound, other in ((low, schema.get("maximum", high)), (high, schema.get("minimum", low))):
        if schema.get("type") == "integer" or not (is_number(bound) and is_number(other)):
            continue
        if bound == math.floor(bound) and other != math.floor(other) and abs(bound - other) < 1:
            raise GrammarError(
                f"the excluded bound {bound} at {path} cannot be held together with {other}: use"
                " minimum or maximum"
            )


def _next_above(bound: float) -> float:
    """The least number that the library can count with and that is no less than a lower bound."""
    if abs(bound) < _LEAST:
        return _LEAST if bound > 0 else 0
    if bound < -_MOST:
        return -_MOST
    near = float(bound)
    return near if near >= bound else math.nextafter(near, math.inf)


def bounded_type(keys: set[str]) -> str | None:
    """The type that all of these keywords bound; None: they bound none or several."""
    for kind, bounds in (*SIZES.items(), ("number", NUMBER)):
        if keys and keys <= set(bounds):
            return kind
    return None


def outside(kind: str, bounds: Schema) -> Iterator[Schema]:
    """Schemas for the values of a type outside some bounds."""
    if kind in SIZES:
        low, high = SIZES[kind]
        if bounds.get(low, 0) > 0:
            yield {"type": kind, high: bounds[low] - 1}
        if high in bounds:
            yield {"type": kind, low: bounds[high] + 1}
        return
    opposite = dict(zip(NUMBER, (*NUMBER[:1:-1], *NUMBER[1::-1]), strict=True))
    for keyword, bound in bounds.items():
        yield {"type": kind, opposite[keyword]: bound}


def fractions(schema: Schema, path: str) -> list[Schema]:
    """Schemas for the fractions within the bounds of a schema. Raises GrammarError for bounds that
    the library would not keep."""
    low = max((schema[key] for key in NUMBER[::2] if is_number(schema.get(key))), default=-math.inf)
    high = min(
        (schema[key] for key in NUMBER[1::2] if is_number(schema.get(key))), default=math.inf
    )
    for bound in (low, high):
        if math.isfinite(bound) and bound != math.floor(bound):
            raise GrammarError(
                f"whole numbers at {path} cannot be excluded with the bound {bound}: use a whole"
                " number"
            )
    return [
        {"type": "number", "exclusiveMinimum": each, "exclusiveMaximum": each + 1}
        for each in range(-_MOST_FRACTION, _MOST_FRACTION)
        if low <= each and each + 1 <= high
    ]


TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == math.floor(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


Test = Callable[[Any], bool]


def _list_of(kind: Test, least: int = 0) -> Test:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(kind, value))


def _map_of(*kinds: Test) -> Test:
    return lambda value: (
        isinstance(value, dict)
        and all(any(kind(each) for kind in kinds) for each in value.values())
    )


Kind = tuple[str, Test]
_SIZE: Kind = ("a whole number of at least 0", _is_size)
_NUMBER_KIND: Kind = ("a number", is_number)
_BOUND: Kind = (
    "a number, or true or false",
    lambda value: isinstance(value, bool) or is_number(value),
)
_TEXT: Kind = ("a string", _is_text)
_SCHEMA: Kind = ("a schema", _is_schema)
_SCHEMAS: Kind = ("a list of at least one schema", _list_of(_is_schema, 1))
_TEXTS: Kind = ("a list of strings", _list_of(_is_text))
_SCHEMA_MAP: Kind = ("an object of schemas", _map_of(_is_schema))
KINDS: Mapping[str, Kind] = {
    "type": (f"one of {', '.join(TYPES)}, or a list of them", _is_type),
    "enum": ("a list of values", lambda value: isinstance(value, list)),
    "pattern": _TEXT,
    "format": _TEXT,
    "$ref": _TEXT,
    "required": _TEXTS,
    "multipleOf": ("a number above 0", lambda value: is_number(value) and value > 0),
    "minimum": _NUMBER_KIND,
    "maximum": _NUMBER_KIND,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _SIZE),
    **dict.fromkeys(("minProperties", "maxProperties"), _SIZE),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _SCHEMA),
    **dict.fromkeys(("anyOf", "allOf", "oneOf"), _SCHEMAS),
    "prefixItems": ("a list of schemas", _list_of(_is_schema)),
    "items": ("a schema", lambda value: _is_schema(value) or _list_of(_is_schema)(value)),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _SCHEMA_MAP),
    **dict.fromkeys(("$defs", "definitions"), _SCHEMA_MAP),
    "dependentRequired": ("an object of lists of strings", _map_of(_TEXTS[1])),
    "dependencies": (
        "an object of lists of strings and schemas",
        _map_of(_list_of(_is_text), _is_schema),
    ),
}


def check_kinds(schema: Mapping[str, Any], path: str) -> None:
    """Raises GrammarError for a keyword of a schema, not of its parts, with a value of another
    kind."""
    for keyword, value in schema.items():
        name, holds = KINDS.get(keyword, ("", None))
        if holds is not None and not holds(value):
            raise GrammarError(f"{keyword} at {path} must be {name}, got {shown(value)}")
