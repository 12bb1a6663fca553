"""Keywords of JSON schemas that exclude values, said by what is left: `not`, `if`, `oneOf` and
dependences of properties, and `uniqueItems`, where that is exact and short. Otherwise they are
refused by their names and places."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from math import perm
from typing import Any

from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.disjoint import equal, type_of, values_of
from vllmx_engine.grammar.presence import ANNOTATIONS, case_schema, formula_of, hold, said_by

Schema = dict[str, Any]
_TYPES = ("null", "boolean", "object", "array", "string", "number")
_MAX_ARRAYS = 400
"""Arrays of different items that are listed one by one."""
_MAX_HOLES = 16
"""Whole numbers that may be excluded."""


def rewrite(schema: Schema, path: str) -> Schema:
    """The schema without these keywords; its parts are left as they are. Raises GrammarError."""
    found = dict(schema)
    _conditions(found, path)
    _presence(found, path)
    if "not" in found:
        _negation(found, found.pop("not"), path)
    if found.get("uniqueItems") is not None:
        _unique_items(found, path)
    return found


# --- which properties there are -------------------------------------------------------------------
def _presence(schema: Schema, path: str) -> None:
    """Holds an object to the keywords that speak of nothing but which properties it has."""
    if schema.get("type") == "object":
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                schema[key] = [_of_object(branch) for branch in schema[key]]
    for key in ("oneOf", "not", "dependentRequired", "dependencies"):
        formula = said_by(schema, key)
        if formula is None:
            continue
        if "type" not in schema and not formula.holds_of_others:
            schema["type"] = "object"
        if schema.get("type") == "object":
            del schema[key]
            hold(schema, formula, key, path)


# --- if -------------------------------------------------------------------------------------------
def _conditions(schema: Schema, path: str) -> None:
    """Conditions of the schema and of its `allOf`, by the values of the property that each looks
    at."""
    conditions, rest = [], []
    if "if" in schema:
        conditions.append((schema, f"{path}/if"))
    for number, part in enumerate(schema.get("allOf") or ()):
        if isinstance(part, dict) and "if" in part and not set(part) - _CONDITION:
            conditions.append((part, f"{path}/allOf/{number}/if"))
        else:
            rest.append(part)
    conditions += _dependences(schema, path)
    rest += [{"anyOf": list(_branches(schema, each, where))} for each, where in conditions]
    for key in ("if", "then", "else"):  # the last two say nothing without the first
        schema.pop(key, None)
    if rest:
        schema["allOf"] = rest


_CONDITION = ANNOTATIONS | {"if", "then", "else"}


def _dependences(schema: Schema, path: str) -> Iterator[tuple[Schema, str]]:
    """The schemas that hold where a property is present, as conditions."""
    for key in ("dependentSchemas", "dependencies"):
        found = _mapping(schema, key)
        if not any(isinstance(part, dict | bool) for part in found.values()):
            continue
        del schema[key]
        for name, part in found.items():
            then = {"required": part} if isinstance(part, list) else part
            yield {"if": {"required": [name]}, "then": then}, f"{path}/{key}/{name}"


def _branches(schema: Schema, condition: Schema, path: str) -> Iterator[Any]:
    """The cases of a condition, each with what holds in it."""
    formula = formula_of(condition["if"])
    if formula is None:
        yield from _cases_of_values(schema, condition, path)
        return
    _check_is_object(schema, path)
    required = frozenset(schema.get("required") or ())
    for key, held in (("then", formula), ("else", formula.negated())):
        for case in held.cases(required):
            yield from _with(case_schema(case), condition.get(key, True))


def _cases_of_values(schema: Schema, condition: Schema, path: str) -> Iterator[Any]:
    name, tested = _tested(condition["if"], path)
    domain = _domain(_mapping(schema, "properties").get(name))
    if domain is None:
        raise GrammarError(
            f"if at {path} looks at the property {shown(name)}, which can be held where that has"
            " an enum, a const or the type boolean: give it one beside the if, or write the cases"
            " as branches of anyOf"
        )
    _check_is_object(schema, path)
    is_met = [any(equal(value, other) for other in tested) for value in domain]
    for key, wanted in (("then", True), ("else", False)):
        values = [value for value, met in zip(domain, is_met, strict=True) if met is wanted]
        branch = condition.get(key, True)
        if values and branch is not False:
            yield _restricted(branch, name, values)
    if name not in (schema.get("required") or ()):  # a test of what is missing is met
        is_wanted = name in (condition["if"].get("required") or ())
        branch = condition.get("else" if is_wanted else "then", True)
        yield from _with(case_schema({name: False}), branch)


def _check_is_object(schema: Schema, path: str) -> None:
    if schema.get("type") != "object":
        raise GrammarError(f'if at {path} can be held beside "type": "object" alone: say so')


def _with(case: Schema, branch: Any) -> Iterator[Schema]:
    """A case of an object with what holds in it; nothing, where nothing does."""
    if branch is not False:
        yield case if branch is True or not branch else {"allOf": [case, _of_object(branch)]}


def _of_object(branch: Any) -> Any:
    """A branch of a schema of objects: it need not say what they are."""
    return {"type": "object", **branch} if isinstance(branch, dict) else branch


def _restricted(branch: Any, name: str, values: list[Any]) -> Schema:
    """A branch for some values of a property."""
    one = {"type": "object", "properties": {name: {"enum": values}}, "required": [name]}
    if branch is True or not branch:
        return one
    if name in _mapping(branch, "properties") or "allOf" in branch:
        return {"allOf": [one, branch]}
    required = [*(branch.get("required") or ()), name]
    properties = {**_mapping(branch, "properties"), name: {"enum": values}}
    return {**branch, "type": "object", "properties": properties, "required": required}


def _tested(test: Any, path: str) -> tuple[str, list[Any]]:
    """The property that a condition looks at, and the values that meet it."""
    properties = _mapping(test, "properties") if isinstance(test, dict) else {}
    others = set(test) - {"properties", "required", "type"} - ANNOTATIONS if properties else {1}
    if len(properties) == 1 and not others:
        ((name, part),) = properties.items()
        values = values_of(part) if isinstance(part, dict) else None
        is_plain = values is not None and not set(part) - {"const", "enum"} - ANNOTATIONS
        if is_plain and set(test.get("required") or ()) <= {name}:
            assert values is not None, "checked above"
            return name, values
    raise GrammarError(
        f"if at {path} can be held where it looks at one property by const or enum alone, or at"
        " which properties there are: write other cases as branches of anyOf"
    )


def _domain(schema: Any) -> list[Any] | None:
    """All values that a schema allows, where they are few."""
    if not isinstance(schema, dict):
        return None
    values = values_of(schema)
    if values is not None:
        return values
    of_types: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    return of_types.get(str(schema.get("type")))


# --- not ------------------------------------------------------------------------------------------
def _negation(schema: Schema, excluded: Any, path: str) -> None:
    keys = set(excluded) - ANNOTATIONS if isinstance(excluded, dict) else set()
    if excluded is False:
        return
    if not keys:
        raise _nothing_left(path)
    values = values_of(excluded)
    if keys == {"type"}:
        _without_types(schema, excluded["type"], path)
    elif values is not None and not keys - {"const", "enum"}:
        _without_values(schema, values, path)
    else:
        raise GrammarError(
            f"not at {path} can be held where it excludes types, the values of an enum or a const,"
            " or which properties an object has: say what is allowed in its place"
        )


def _without_types(schema: Schema, types: Any, path: str) -> None:
    excluded = {types} if isinstance(types, str) else set(types)
    values = values_of(schema)
    if values is not None:
        _set_values(schema, [v for v in values if not _names(v) & excluded], path)
        return
    own = _own_types(schema)
    if "number" in own and "integer" in excluded and "number" not in excluded:
        raise GrammarError(
            f"not at {path} excludes whole numbers, which cannot be held: exclude all numbers, or"
            " say what is allowed in its place"
        )
    if "number" in excluded:
        excluded.add("integer")
    _set_types(schema, [name for name in own if name not in excluded], path)


def _without_values(schema: Schema, excluded: list[Any], path: str) -> None:
    values = _domain(schema)
    if values is not None:
        kept = [v for v in values if not any(equal(v, other) for other in excluded)]
        _set_values(schema, kept, path)
        return
    own = _own_types(schema)
    relevant = [value for value in excluded if _names(value) & set(own)]
    if not relevant:
        return
    if all(value is None for value in relevant):
        _set_types(schema, [name for name in own if name != "null"], path)
    elif own == ["integer"] and len(relevant) <= _MAX_HOLES:
        ranges = list(_between(sorted({int(value) for value in relevant}), schema))
        if not ranges:
            raise _nothing_left(path)
        schema["allOf"] = [*(schema.get("allOf") or ()), {"anyOf": ranges}]
    else:
        raise GrammarError(
            f"not at {path} excludes single values ({shown(relevant[0])}) of what has no enum,"
            " which cannot be held but for whole numbers: list in an enum what is allowed"
        )


def _between(holes: list[int], schema: Schema) -> Iterator[Schema]:
    """Whole numbers below, between and above those that are excluded, as far as they may be."""
    least, most = schema.get("minimum"), schema.get("maximum")
    for low, high in zip([None, *holes], [*holes, None], strict=True):
        bounds = {
            "minimum": None if low is None else low + 1,
            "maximum": None if high is None else high - 1,
        }
        lower = max((x for x in (bounds["minimum"], least) if x is not None), default=None)
        upper = min((x for x in (bounds["maximum"], most) if x is not None), default=None)
        if lower is None or upper is None or lower <= upper:
            yield {"type": "integer", **{k: x for k, x in bounds.items() if x is not None}}


def _own_types(schema: Schema) -> list[str]:
    named = schema.get("type", list(_TYPES))
    return [named] if isinstance(named, str) else list(named)


def _names(value: Any) -> set[str]:
    """The types that a value has."""
    name = type_of(value)
    is_whole = name == "number" and float(value).is_integer()
    return {name, "integer"} if is_whole else {name}


def _set_values(schema: Schema, values: list[Any], path: str) -> None:
    if not values:
        raise _nothing_left(path)
    schema.pop("const", None)
    schema["enum"] = values


def _set_types(schema: Schema, names: list[str], path: str) -> None:
    if not names:
        raise _nothing_left(path)
    schema["type"] = names[0] if len(names) == 1 else names


def _nothing_left(path: str) -> GrammarError:
    return GrammarError(f"not at {path} excludes all that the schema allows there: nothing is left")


# --- uniqueItems ----------------------------------------------------------------------------------
def _unique_items(schema: Schema, path: str) -> None:
    """Arrays of different items out of few, listed one by one."""
    is_wanted = schema.pop("uniqueItems")
    most = schema.get("maxItems")
    if is_wanted is False or (isinstance(most, int) and most < 2):
        return
    values = _domain(schema.get("items"))
    is_alone = not set(schema) - ANNOTATIONS - {"type", "items", "minItems", "maxItems"}
    if schema.get("type") == "array" and values is not None and is_alone:
        items = _different(values)
        longest = len(items) if most is None else min(most, len(items))
        sizes = range(schema.get("minItems", 0), longest + 1)
        if 0 < sum(perm(len(items), size) for size in sizes) <= _MAX_ARRAYS:
            arrays = [list(each) for size in sizes for each in permutations(items, size)]
            schema.clear()
            schema["enum"] = arrays
            return
    raise GrammarError(
        f"uniqueItems at {path} can be held for an array whose items have an enum of few values (5"
        " of them, or more with a small maxItems): items cannot be compared while an answer is"
        " written, so leave it out or list the items"
    )


def _different(values: list[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if not any(equal(value, other) for other in found):
            found.append(value)
    return found


def _mapping(schema: Any, key: str) -> dict[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}
