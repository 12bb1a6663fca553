"""Decides whether two JSON schemas exclude each other, as far as their keywords tell."""

from __future__ import annotations

from typing import Any

from vllmx_engine.grammar.keywords import SIZES
from vllmx_engine.grammar.parts import Schema, is_among, own_types, resolved, type_of, values_of

_MAX_DEPTH = 8
"""The most properties and branches that are followed."""
_MAX_PAIRS = 4096
_RANGES = {**SIZES, "number": ("minimum", "maximum")}


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
        first, other = resolved(self._root, first), resolved(self._root, other)
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
        first, other = resolved(self._root, first), resolved(self._root, other)
        if not isinstance(first, dict) or not isinstance(other, dict):
            return None
        own, others = first.get("properties") or {}, other.get("properties") or {}
        for name in own:
            may_be_there = own[name] is not False or others.get(name) is not False
            if name in others and may_be_there and self.are(own[name], others[name]):
                return str(name)
        return None

    def _differ_as(self, kind: str, first: Schema, other: Schema, depth: int) -> bool:
        """True if no value of one type satisfies both."""
        if kind in _RANGES and _apart(first, other, *_RANGES[kind]):
            return True
        return kind == "object" and (
            self._properties(first, other, depth) or self._properties(other, first, depth)
        )

    def _properties(self, first: Schema, other: Schema, depth: int) -> bool:
        """A property that the first requires is what the other excludes."""
        own, others = first.get("properties") or {}, other.get("properties") or {}
        is_closed = other.get("additionalProperties") is False
        for name in first.get("required") or ():
            if name in others:
                if self.are(own.get(name, True), others[name], depth + 1):
                    return True
            elif is_closed and not other.get("patternProperties"):
                return True
        return False

    def _branches(self, first: Schema, other: Schema, depth: int) -> bool:
        """All branches of the first exclude the other, or one that it must satisfy does."""
        for key, rule in (("anyOf", all), ("oneOf", all), ("allOf", any)):
            parts = first.get(key)
            if parts and rule(self.are(part, other, depth + 1) for part in parts):
                return True
        return False


def _types(schema: Schema) -> set[str]:
    """The types that a value may have; integers count as numbers."""
    values = values_of(schema)
    if values is not None:
        return set(map(type_of, values))
    return {"number" if name == "integer" else name for name in own_types(schema)}


def _different_values(first: Schema, other: Schema) -> bool:
    mine, others = values_of(first), values_of(other)
    return mine is not None and others is not None and not any(is_among(x, others) for x in mine)


def _apart(first: Schema, other: Schema, low: str, high: str) -> bool:
    """True if one ends before the other begins."""
    for lower, upper in ((first, other), (other, first)):
        least, most = upper.get(low), lower.get(high)
        if least is not None and most is not None and most < least:
            return True
    return False
