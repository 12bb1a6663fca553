"""Definitions of JSON schemas that need themselves: no value of theirs ends."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from vllmx_engine.grammar.disjoint import place_of_reference, references, referred
from vllmx_engine.grammar.presence import NothingLeftError

Schema = dict[str, Any]


def endless(root: Schema) -> dict[str, NothingLeftError]:
    """The definitions, by their places, whose values would all be infinitely deep."""
    parts = {place_of_reference(each): referred(root, each) for each in ("#", *references(root))}
    while ended := [place for place, part in parts.items() if _ends(part, parts)]:
        for place in ended:
            del parts[place]
    return {
        place: NothingLeftError(
            f"{place} needs itself, so that no value of it ends: let a property be absent or null"
        )
        for place in parts
    }


def _ends(schema: Any, open_places: Container[str]) -> bool:
    """Whether a schema may have a finite value, if those at `open_places` have none."""
    if not isinstance(schema, dict):
        return True
    own = schema.get("$ref")
    if isinstance(own, str) and place_of_reference(own) in open_places:
        return False
    for key, rule in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(key)
        if parts and not rule(_ends(part, open_places) for part in parts):
            return False
    return all(_ends(part, open_places) for part in _needed(schema))


def _needed(schema: Schema) -> list[Any]:
    """The parts that every value of a schema has."""
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return [properties.get(name) for name in schema.get("required", ())]
    if schema.get("type") == "array":
        least, first = int(schema.get("minItems", 0)), schema.get("prefixItems", [])
        return [*first[:least], schema.get("items") if least > len(first) else None]
    return []
