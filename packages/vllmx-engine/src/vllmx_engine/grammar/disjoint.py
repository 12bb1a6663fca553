"""Decides whether two JSON schemas exclude each other, as far as their keywords tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))
_MAX_DEPTH = 8
"""The most references and properties that are followed."""
_MAX_PAIRS = 4096
_SIZES = (
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)
Schema = dict[str, Any]


class Disjoint:
    """Says whether schemas exclude each other, over the references of one schema.

    Args:
        root: what references are resolved in.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._pairs_left = _MAX_PAIRS

    def are(self, first: Any, other: Any, depth: int = 0) -> bool:
        """True only where they certainly exclude each other."""
        self._pairs_left -= 1
        if depth > _MAX_DEPTH or self._pairs_left < 0:
            return False
        first, other = self.resolved(first), self.resolved(other)
        if first is False or other is False:
            return True
        if not isinstance(first, dict) or not isinstance(other, dict):
            return False
        shared = _types(first) & _types(other)
        return (
            not shared
            or _different_values(first, other)
            or all(self._differ_as(kind, first, other, depth) for kind in shared)
            or self._branches(first, other, depth)
            or self._branches(other, first, depth)
        )

    def telling_property(self, first: Any, other: Any) -> str | None:
        """A property whose values tell two schemas of objects apart wherever it is present."""
        first, other = self.resolved(first), self.resolved(other)
        if not isinstance(first, dict) or not isinstance(other, dict):
            return None
        own, others = _mapping(first, "properties"), _mapping(other, "properties")
        for name in own:
            may_be_there = own[name] is not False or others.get(name) is not False
            if name in others and may_be_there and self.are(own[name], others[name]):
                return name
        return None

    def _differ_as(self, kind: str, first: Schema, other: Schema, depth: int) -> bool:
        """True if no value of one type satisfies both."""
        if any(_apart(first, other, low, high) for at, low, high in _SIZES if at == kind):
            return True
        if kind == "number":
            return _apart(first, other, "minimum", "maximum")
        if kind == "object":
            return self._properties(first, other, depth) or self._properties(other, first, depth)
        return False

    def _properties(self, first: Schema, other: Schema, depth: int) -> bool:
        """A property that the first requires is what the other excludes."""
        own, others = _mapping(first, "properties"), _mapping(other, "properties")
        for name in first.get("required") or ():
            if name in others:
                if self.are(own.get(name, True), others[name], depth + 1):
                    return True
            elif other.get("additionalProperties") is False and not other.get("patternProperties"):
                return True
        return False

    def _branches(self, first: Schema, other: Schema, depth: int) -> bool:
        """All branches of the first exclude the other, or one that it must satisfy does."""
        for key, rule in (("anyOf", all), ("oneOf", all), ("allOf", any)):
            parts = first.get(key)
            if not isinstance(parts, list) or not parts:
                continue
            if rule(self.are(part, other, depth + 1) for part in parts):
                return True
        return False

    def resolved(self, schema: Any) -> Any:
        """Returns a reference's target, or the schema itself; None for a reference without a
        target."""
        for _ in range(_MAX_DEPTH):
            if not (isinstance(schema, dict) and set(schema) == {"$ref"}):
                return schema
            schema = self._lookup(schema["$ref"])
        return None

    def _lookup(self, reference: Any) -> Any:
        """Returns the target of a reference into this schema; None for any other."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        return referred(self._root, reference)


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


def references(schema: Any) -> set[str]:
    """All references of a schema into itself."""
    if isinstance(schema, list):
        return set[str]().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    found = set[str]().union(*map(references, schema.values()))
    own = schema.get("$ref")
    return found | {own} if isinstance(own, str) and own.startswith("#/") else found


def place_of_reference(reference: str) -> str:
    """The place that a reference leads to, as messages write it."""
    return _unescaped(unquote(reference))


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _types(schema: Schema) -> frozenset[str]:
    """The types that a value may have; integers count as numbers."""
    values = values_of(schema)
    if values is not None:
        return frozenset(map(type_of, values))
    named = schema.get("type")
    if named is None:
        return _TYPES
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else _TYPES
    return frozenset("number" if name == "integer" else name for name in names)


def values_of(schema: Schema) -> list[Any] | None:
    """All that a schema allows, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _different_values(first: Schema, other: Schema) -> bool:
    mine, others = values_of(first), values_of(other)
    if mine is None or others is None:
        return False
    return not any(equal(one, another) for one in mine for another in others)


def equal(one: Any, another: Any) -> bool:
    """Equality as JSON has it: 1 is 1.0, and true is not 1."""
    return bool(one == another) and type_of(one) == type_of(another)


def type_of(value: Any) -> str:
    """The name of a value's type; whole numbers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: Iterable[tuple[type | tuple[type, ...], str]] = (
        (dict, "object"),
        (list, "array"),
        (str, "string"),
        ((int, float), "number"),
    )
    return next(name for kind, name in kinds if isinstance(value, kind))


def _apart(first: Schema, other: Schema, low: str, high: str) -> bool:
    """True if one ends before the other begins."""
    for lower, upper in ((first, other), (other, first)):
        least, most = upper.get(low), lower.get(high)
        if isinstance(least, int | float) and isinstance(most, int | float) and most < least:
            return True
    return False


def _mapping(schema: Schema, key: str) -> dict[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}
