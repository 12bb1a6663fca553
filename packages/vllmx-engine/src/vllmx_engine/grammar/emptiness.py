"""Finds JSON schemas that allow no value: by bounds that nothing keeps, by parts that allow nothing
and must be there, and by definitions that need themselves."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

from vllmx_core.errors import shown

from vllmx_engine.grammar.keywords import NUMBER, SIZES, is_number
from vllmx_engine.grammar.parts import (
    NothingLeftError,
    Schema,
    is_among,
    own_types,
    place_of_reference,
    references,
    referred,
    types_of_value,
    values_of,
)


def check_values(schema: Schema, path: str) -> None:
    """Raises NothingLeftError where no value keeps the bounds of a schema, or where its list has no
    value of its types."""
    own, values = own_types(schema), values_of(schema)
    if values is None:
        whys = [_impossible(kind, schema) for kind in own]
        if whys and None not in whys:
            raise NothingLeftError(f"{whys[0]} at {path}: nothing is left")
        return
    if "const" in schema and not is_among(values[0], schema.get("enum", values)):
        raise NothingLeftError(f"const at {path} is not in its enum: nothing is left")
    if not any(types_of_value(value) & set(own) for value in values):
        listed = "const" if "const" in schema else "enum"
        raise NothingLeftError(
            f"{listed} at {path} has no value of the schema's type: nothing is left"
        )


def _impossible(kind: str, schema: Schema) -> str | None:
    """Why no value of a type keeps the bounds of a schema; None: some may."""
    if kind == "array" and schema.get("items") is False:
        known = len(schema.get("prefixItems") or ())
        if schema.get("minItems", 0) > known:
            return f"minItems {schema['minItems']} is greater than the {known} items allowed"
    pairs = [SIZES[kind]] if kind in SIZES else []
    if kind in ("number", "integer"):
        pairs = [(low, high) for low in NUMBER[::2] for high in NUMBER[1::2]]
    for low, high in pairs:
        least, most = schema.get(low), schema.get(high)
        if not is_number(least) or not is_number(most):
            continue
        if least > most:
            return f"{low} {least} is greater than {high} {most}"
        if least == most and (low, high) != ("minimum", "maximum") and kind not in SIZES:
            return f"{low} {least} and {high} {most} leave no number"
    return _no_whole_number(schema) if kind == "integer" else None


def _no_whole_number(schema: Schema) -> str | None:
    """Why no integer lies within the bounds of a schema; None: some may."""
    least, most = (schema.get(key) for key in ("minimum", "maximum"))
    above, below = (schema.get(key) for key in ("exclusiveMinimum", "exclusiveMaximum"))
    lows = [math.ceil(least)] if is_number(least) else []
    lows += [math.floor(above) + 1] if is_number(above) else []
    highs = [math.floor(most)] if is_number(most) else []
    highs += [math.ceil(below) - 1] if is_number(below) else []
    if not lows or not highs:
        return None
    low, high, step = max(lows), min(highs), schema.get("multipleOf", 1)
    if is_number(step) and step > 0 and float(step).is_integer():
        low = -(-low // int(step)) * int(step)
    if low <= high:
        return None
    given = {key: schema[key] for key in (*NUMBER, "multipleOf") if key in schema}
    return " and ".join(f"{key} {value}" for key, value in given.items()) + " leave no whole number"


# --- parts ----------------------------------------------------------------------------------------
def check_required(schema: Schema, path: str, nothing_left: Mapping[str, NothingLeftError]) -> None:
    """Raises NothingLeftError where a part allows nothing that the schema needs.

    Args:
        nothing_left: why parts allow nothing, by their places.
    """
    needed = [f"allOf/{number}" for number, _ in enumerate(schema.get("allOf") or ())]
    if schema.get("type") == "object":
        needed += [f"properties/{name}" for name in schema.get("required") or ()]
    if schema.get("type") == "array" and schema.get("minItems", 0) > 0:
        needed += [] if schema.get("prefixItems") else ["items"]
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        if parts and all(part is False for part in parts):
            needed.append(f"{key}/0")
    for place in needed:
        if (error := nothing_left.get(f"{path}/{place}")) is not None:
            raise error
    if schema.get("type") == "object":
        _check_names(schema, path)


def _check_names(schema: Schema, path: str) -> None:
    """Raises NothingLeftError where an object must have a property that it may not have."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    for name in required:
        if name in properties and properties[name] is not False:
            continue
        if name in properties or is_closed:
            raise NothingLeftError(
                f"required at {path} names the property {shown(name)}, which the schema excludes:"
                " nothing is left"
            )
    most = schema.get("maxProperties")
    if isinstance(most, int) and len(set(required)) > most:
        raise NothingLeftError(
            f"required at {path} names more properties than maxProperties {most}: nothing is left"
        )


# --- definitions ----------------------------------------------------------------------------------
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
    """True if a schema may have a finite value when those at `open_places` have none."""
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
