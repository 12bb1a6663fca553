"""JSON schemas made ready for llguidance: what it does not take is written another way where that
says exactly the same, and refused by its name where nothing does.

The library checks most keywords itself. Here stand those that it refuses although they can be said
otherwise, and the few that it would hold wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.disjoint import Disjoint
from vllmx_engine.grammar.rewrites import rewrite

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that are held. Others are annotations, as the specification has it of all by default."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains")
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "$dynamicRef")
Schema = dict[str, Any]


def prepare(schema: Schema) -> Schema:
    """The same schema in the library's words. Raises GrammarError by the keyword that cannot be
    held."""
    try:
        prepared: Schema = _Preparation(schema).of(schema, "#")
    except RecursionError:
        raise GrammarError("the schema is nested too deeply: flatten it") from None
    except GrammarError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise GrammarError("a keyword of the schema has a value of the wrong type") from None
    return prepared


class _Preparation:
    def __init__(self, root: Schema) -> None:
        self._disjoint = Disjoint(root)

    def of(self, schema: Any, path: str) -> Any:
        """A schema whose parts are prepared, then itself."""
        if not isinstance(schema, dict):
            return schema
        found = rewrite(schema, path)
        for key, part in list(_parts(found)):
            found[key] = self._part(key, part, f"{path}/{key}")
        _formats(found)
        _unevaluated(found)
        _property_names(found, path)
        _check_bounds(found, path)
        if "oneOf" in found:
            self._one_of(found, path)
        return found

    def _part(self, key: str, part: Any, path: str) -> Any:
        if key in _MAPS and isinstance(part, dict):
            return {name: self.of(inner, f"{path}/{name}") for name, inner in part.items()}
        if isinstance(part, list):
            return [self.of(inner, f"{path}/{number}") for number, inner in enumerate(part)]
        return self.of(part, path)

    def _one_of(self, schema: Schema, path: str) -> None:
        """Turns `oneOf` into `anyOf` where branches exclude each other: at most one of them holds
        then."""
        branches = schema["oneOf"]
        if not isinstance(branches, list) or "anyOf" in schema:
            raise GrammarError(f"oneOf at {path} cannot be held beside anyOf: nest one of them")
        for number, first in enumerate(branches):
            for other in branches[number + 1 :]:
                if not self._disjoint.are(first, other):
                    raise GrammarError(
                        f"oneOf at {path} has branches that may hold together ({shown(first)} and"
                        f" {shown(other)}), which cannot be ruled out while an answer is written:"
                        " use anyOf, or tell them apart by a required property with a const"
                    )
        schema["anyOf"] = schema.pop("oneOf")


def _parts(schema: Schema) -> Iterator[tuple[str, Any]]:
    for key in (*_MAPS, *_LISTS, *_SINGLE):
        if isinstance(schema.get(key), dict | list):
            yield key, schema[key]


def _formats(schema: Schema) -> None:
    if "format" in schema and schema["format"] not in FORMATS:
        del schema["format"]


def _unevaluated(schema: Schema) -> None:
    """Turns what is not evaluated into what is additional, where nothing else is applied to the
    same place."""
    if any(key in schema for key in _COMPOSED):
        return
    if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")
    if "unevaluatedItems" in schema and "items" not in schema:
        schema["items"] = schema.pop("unevaluatedItems")


def _property_names(schema: Schema, path: str) -> None:
    """A pattern or a list of names for all properties, where none has a schema of its own."""
    names = schema.get("propertyNames")
    if names is None:
        return
    rest = (
        {key: value for key, value in names.items() if key != "type"} if names is not True else {}
    )
    others = schema.get("additionalProperties", {})
    if not rest:
        del schema["propertyNames"]
    elif "properties" in schema or "patternProperties" in schema:
        raise GrammarError(f"propertyNames at {path} cannot be held beside properties")
    elif set(rest) == {"pattern"}:
        schema["patternProperties"] = {rest["pattern"]: others}
    elif set(rest) == {"enum"} and isinstance(rest["enum"], list):
        schema["properties"] = {name: others for name in rest["enum"] if isinstance(name, str)}
    else:
        raise GrammarError(f"propertyNames at {path} can be held as a pattern or an enum alone")
    if schema.pop("propertyNames", None) is not None:
        schema["additionalProperties"] = False


def _check_bounds(schema: Schema, path: str) -> None:
    """Refuses bounds that the library gets wrong: between two whole numbers it takes a lower bound
    that is whole, or an upper one below zero, as allowed although it is excluded."""
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    for bound, other in ((low, schema.get("maximum", high)), (high, schema.get("minimum", low))):
        if schema.get("type") == "integer" or not (_is_number(bound) and _is_number(other)):
            continue
        if _is_whole(bound) and not _is_whole(other) and abs(bound - other) < 1:
            raise GrammarError(
                f"the excluded bound {bound} at {path} cannot be held beside {other}: use"
                " minimum or maximum"
            )


def _is_whole(value: float) -> bool:
    return value == math.floor(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def place_of(schema: Any, keyword: str, path: str = "#") -> str | None:
    """The place where a schema has a keyword, in the words of its error messages."""
    if not isinstance(schema, dict):
        return None
    if keyword in schema:
        return path
    for key, part in _parts(schema):
        for where, each in _places(key, part, f"{path}/{key}"):
            found = place_of(each, keyword, where)
            if found is not None:
                return found
    return None


def _places(key: str, part: Any, path: str) -> Iterator[tuple[str, Any]]:
    if key in _MAPS and isinstance(part, dict):
        yield from ((f"{path}/{name}", each) for name, each in part.items())
    elif isinstance(part, list):
        yield from ((f"{path}/{number}", each) for number, each in enumerate(part))
    else:
        yield path, part
