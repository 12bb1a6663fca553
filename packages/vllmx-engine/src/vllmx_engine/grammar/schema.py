"""JSON schemas made ready for llguidance: what it does not take is written another way where that
says exactly the same, and refused by its name where nothing does.

The passes over a schema: `keywords` checks the kinds of all values; `emptiness` finds definitions
that need themselves; all definitions move to where the library looks for them; then each schema is
rewritten, its parts first. That last pass is repeated while it finds definitions that allow
nothing. The library checks most keywords itself.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.disjoint import Disjoint
from vllmx_engine.grammar.emptiness import check_required, endless
from vllmx_engine.grammar.keywords import check_bounds, check_kinds, narrow
from vllmx_engine.grammar.parts import (
    ANNOTATIONS,
    PARTS,
    NothingLeftError,
    Schema,
    add_choice,
    all_parts,
    place_of_reference,
    references,
    referred,
    resolved,
    with_parts,
)
from vllmx_engine.grammar.rewrites import exclude, rewrite

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that are held. Others are annotations, as the specification has it of all by default."""
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "$dynamicRef")
_OF_REFERENCES = "%#/?:@!$&'()*+,;=-._~"
"""Characters that stay as they are in a reference, next to letters and digits."""


def prepare(schema: Schema) -> Schema:
    """The same schema in the library's words. Raises GrammarError by the keyword that cannot be
    held."""
    try:
        _check_all_kinds(schema)
        empty = endless(schema)
        if "#" in empty:
            raise empty["#"]
        root, moved = _with_all_definitions(schema)
        while True:
            preparation = _Preparation(root, empty, moved)
            prepared = preparation.of(root, "#")
            found = preparation.empty_definitions()
            if found.keys() <= empty.keys():
                break
            empty |= found
    except RecursionError:
        raise GrammarError("the schema is nested too deeply: flatten it") from None
    except GrammarError:
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise GrammarError("a keyword of the schema has a value of the wrong type") from None
    if prepared is False:
        raise preparation.nothing_left["#"]
    assert isinstance(prepared, dict), "the schema is one"
    return prepared


def _check_all_kinds(schema: Any, path: str = "#") -> None:
    for where, part in all_parts(schema, path):
        check_kinds(part, where)


class _Preparation:
    """Prepares a schema and its parts.

    Args:
        empty: definitions that allow nothing, by their places.
        moved: references to definitions that were moved, by their old places.
    """

    def __init__(
        self, root: Schema, empty: dict[str, NothingLeftError], moved: dict[str, str]
    ) -> None:
        self._root, self._empty, self._moved = root, empty, moved
        self._disjoint = Disjoint(root)
        self.nothing_left: dict[str, NothingLeftError] = {}
        """Why schemas allow nothing, by their places."""

    def of(self, schema: Any, path: str) -> Any:
        """A schema whose parts are prepared, then itself; False where it allows nothing, so that
        what is optional is left out."""
        if not isinstance(schema, dict):
            return schema
        try:
            return self._prepared(schema, path)
        except NothingLeftError as error:
            self.nothing_left[path] = error
            return False

    def empty_definitions(self) -> dict[str, NothingLeftError]:
        """The definitions that allow nothing."""
        is_definition = re.compile(r"#/(\$defs|definitions)/[^/]*").fullmatch
        return {path: why for path, why in self.nothing_left.items() if is_definition(path)}

    def _prepared(self, schema: Schema, path: str) -> Schema:
        reference = schema.get("$ref")
        if reference is not None and place_of_reference(reference) in self._empty:
            raise self._empty[place_of_reference(reference)]
        if self._branches_tell_type(schema):
            schema = {key: value for key, value in schema.items() if key != "type"}
        found = with_parts(rewrite(self._with_values(schema), path), path, self.of)
        check_required(found, path, self.nothing_left)
        self._plain(found)
        _unevaluated(found)
        _property_names(found, path)
        check_bounds(found, path)
        narrow(found)
        if "oneOf" in found:
            self._one_of(found, path)
        return found

    def _with_values(self, schema: Schema) -> Schema:
        """A schema with what its rewrites compare by values in place of references."""
        found = dict(schema)
        for key in ("not", "if", *(["items"] if "uniqueItems" in schema else [])):
            if key in schema:
                found[key] = self._value(schema[key])
        is_tested = any(isinstance(each, dict) and "if" in each for each in schema.get("allOf", ()))
        if ("if" in schema or is_tested) and "properties" in schema:
            parts = schema["properties"].items()
            found["properties"] = {name: self._value(part) for name, part in parts}
        return found

    def _value(self, part: Any) -> Any:
        found = resolved(self._root, part)
        return part if found is None else found

    def _plain(self, schema: Schema) -> None:
        """Drops annotations, next to which the library does not take recursive references, and
        encodes references, which it takes only as URIs."""
        for key in list(schema):
            is_other = key == "format" and schema[key] not in FORMATS
            if is_other or key in ANNOTATIONS or key.startswith("x-"):
                del schema[key]
        if "$ref" in schema:
            reference: str = schema["$ref"]
            reference = self._moved.get(place_of_reference(reference), reference)
            schema["$ref"] = quote(reference, safe=_OF_REFERENCES)

    def _branches_tell_type(self, schema: Schema) -> bool:
        """True if a schema consists of its branches and each has the schema's own type: the library
        does not take recursive references next to other keywords."""
        keys = {key for key in schema if not key.startswith("$")} - ANNOTATIONS - {"definitions"}
        if keys not in ({"type", "anyOf"}, {"type", "oneOf"}):
            return False
        kind, (key,) = schema["type"], keys - {"type"}
        branches = [resolved(self._root, each) for each in schema[key]]
        return all(isinstance(each, dict) and each.get("type") == kind for each in branches)

    def _one_of(self, schema: Schema, path: str) -> None:
        """Turns `oneOf` into `anyOf` where branches exclude each other, or are made to: at most one
        of them holds then."""
        branches, kept = schema.pop("oneOf"), list[Any]()
        for number, branch in enumerate(branches):
            alone = branch
            for other in (*branches[:number], *branches[number + 1 :]):
                if alone is not False and not self._disjoint.are(alone, other):
                    alone = self._without(alone, branch, other, path)
            kept += [] if alone is False else [alone]
        if not kept:
            raise NothingLeftError(f"oneOf at {path} has no branch that can hold alone")
        if "anyOf" in schema:
            add_choice(schema, kept)
        else:
            schema["anyOf"] = kept

    def _without(self, alone: Any, branch: Any, other: Any, path: str) -> Any:
        """A branch without what another allows; False, where nothing is left.

        Args:
            alone: the branch without what some others allow.
        """
        name = self._disjoint.telling_property(branch, other)
        if name is not None:
            return self._requiring(alone, name, path)
        found = dict(self._inlined(alone, path))
        try:
            exclude(found, resolved(self._root, other), path)
        except NothingLeftError:
            return False
        except GrammarError:
            raise GrammarError(
                f"oneOf at {path} has branches that may hold together ({shown(branch)} and"
                f" {shown(other)}), which cannot be ruled out while an answer is written: use"
                " anyOf, or tell them apart by a property with a const"
            ) from None
        return found

    def _requiring(self, branch: Any, name: str, path: str) -> Schema:
        """A branch for objects that have a property."""
        found = self._inlined(branch, path)
        required = [each for each in found.get("required") or () if each != name]
        return {**found, "type": "object", "required": [*required, name]}

    def _inlined(self, branch: Any, path: str) -> Schema:
        """A branch without its reference, ready to be changed."""
        own = resolved(self._root, branch)
        found = branch if own is branch else self._prepared(own, path)
        return found if isinstance(found, dict) else {}


def _with_all_definitions(root: Schema) -> tuple[Schema, dict[str, str]]:
    """A schema with all that it refers to among its parts, and new references to what was moved:
    definitions may be anywhere, such as in OpenAPI's `components`."""
    moved: dict[str, Any] = {}
    for reference in sorted(references(root)):
        if reference.split("/")[1] not in PARTS:
            place = place_of_reference(reference)[2:]
            moved[place] = referred(root, reference)
            _check_all_kinds(moved[place], f"#/$defs/{place}")
    if not moved:
        return root, {}
    escaped = {name: name.replace("~", "~0").replace("/", "~1") for name in moved}
    new = {f"#/{name}": f"#/$defs/{each}" for name, each in escaped.items()}
    return {**root, "$defs": {**root.get("$defs", {}), **moved}}, new


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
    rest = {} if names is True else {key: names[key] for key in names if key != "type"}
    others = schema.get("additionalProperties", {})
    if not rest:
        del schema["propertyNames"]
    elif "properties" in schema or "patternProperties" in schema:
        raise GrammarError(f"propertyNames at {path} cannot be held together with properties")
    elif set(rest) == {"pattern"}:
        schema["patternProperties"] = {rest["pattern"]: others}
    elif set(rest) == {"enum"} and isinstance(rest["enum"], list):
        schema["properties"] = {name: others for name in rest["enum"] if isinstance(name, str)}
    else:
        raise GrammarError(f"propertyNames at {path} can be held as a pattern or an enum alone")
    if schema.pop("propertyNames", None) is not None:
        schema["additionalProperties"] = False
