"""Keywords of JSON schemas that exclude values, said by what is left: `not`, `if`, `oneOf` and
dependences of properties, and `uniqueItems`, where that is exact and short. Otherwise they are
refused by their names and places."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, permutations
from typing import Any

from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.emptiness import check_values
from vllmx_engine.grammar.keywords import bounded_type, fractions, outside
from vllmx_engine.grammar.parts import (
    ANNOTATIONS,
    NothingLeftError,
    Schema,
    add_choice,
    is_among,
    own_types,
    types_of_value,
    values_of,
)
from vllmx_engine.grammar.presence import (
    case_schema,
    formula_of,
    of_object,
    rewrite_counts,
    rewrite_presence,
)

_MAX_ARRAYS = 400
"""Arrays of different items that are listed one by one."""
_MAX_HOLES = 16
"""Whole numbers that may be excluded."""


def rewrite(schema: Schema, path: str) -> Schema:
    """The schema without these keywords; its parts are left as they are. Raises GrammarError."""
    found = dict(schema)
    check_values(found, path)
    _conditions(found, path)
    rewrite_presence(found, path)
    rewrite_counts(found, path)
    if "not" in found:
        exclude(found, found.pop("not"), path)
    if found.get("uniqueItems") is not None:
        _unique_items(found, path)
    return found


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
    for each, where in conditions:
        branches = list(_branches(schema, each, where))
        if not branches:
            raise NothingLeftError(f"if at {where} excludes all that the schema allows there")
        rest.append({"anyOf": branches})
    for key in ("if", "then", "else"):  # the last two say nothing without the first
        schema.pop(key, None)
    if rest:
        schema["allOf"] = rest


_CONDITION = ANNOTATIONS | {"if", "then", "else"}


def _dependences(schema: Schema, path: str) -> Iterator[tuple[Schema, str]]:
    """The schemas that hold where a property is present, as conditions."""
    for key in ("dependentSchemas", "dependencies"):
        found = schema.get(key) or {}
        if not any(isinstance(part, dict | bool) for part in found.values()):
            continue
        del schema[key]
        for name, part in found.items():
            then = {"required": part} if isinstance(part, list) else part
            yield {"if": {"required": [name]}, "then": then}, f"{path}/{key}/{name}"


def _branches(schema: Schema, condition: Schema, path: str) -> Iterator[Any]:
    """The cases of a condition, each with what holds in it."""
    tested, then, otherwise = (condition.get(key, True) for key in ("if", "then", "else"))
    formula = formula_of(tested)
    values = _tested(tested) if formula is None else None
    if formula is None and values is None:
        yield from _cases_of_any(schema, condition, path)
        return
    own = own_types(schema)
    others = [name for name in own if name != "object"]
    if others:  # they meet what is said of properties alone, where they need not be objects
        is_met = formula is None or formula.holds_of_others
        is_met = is_met and not (isinstance(tested, dict) and "type" in tested)
        yield from _with({"type": others}, then if is_met else otherwise, is_object=False)
    if "object" not in own:
        return
    if formula is None:
        assert values is not None, "returned above"
        yield from _cases_of_values(schema, condition, *values, path)
        return
    required = frozenset(schema.get("required") or ())
    for branch, held in ((then, formula), (otherwise, formula.negated())):
        for case in held.cases(required):
            yield from _with(case_schema(case), branch)


def _cases_of_any(schema: Schema, condition: Schema, path: str) -> Iterator[Any]:
    """Returns the schemas of values that meet a condition and of those that do not, if its
    complement can be expressed."""
    tested = condition["if"]
    values = values_of(schema)
    reverse: Schema = {"type": own_types(schema)} if values is None else {"enum": values}
    otherwise = condition.get("else", True)
    try:
        exclude(reverse, tested, path)
    except NothingLeftError:
        otherwise = False
    except GrammarError:
        raise GrammarError(
            f"if at {path} can be held where it looks at one property by const or enum alone, at"
            " which properties there are, or at types and bounds: write other cases as branches"
            " of anyOf"
        ) from None
    yield from _with(tested, condition.get("then", True), is_object=False)
    yield from _with(reverse, otherwise, is_object=False)


def _cases_of_values(
    schema: Schema, condition: Schema, name: str, tested: list[Any], path: str
) -> Iterator[Any]:
    domain = _domain((schema.get("properties") or {}).get(name))
    if domain is None:
        raise GrammarError(
            f"if at {path} looks at the property {shown(name)}, which can be held where that has"
            " an enum, a const or the type boolean: give it one next to the if, or write the cases"
            " as branches of anyOf"
        )
    for key, wanted in (("then", True), ("else", False)):
        values = [value for value in domain if is_among(value, tested) is wanted]
        branch = condition.get(key, True)
        if values and branch is not False:
            yield _restricted(branch, name, values)
    if name not in (schema.get("required") or ()):  # a test of what is missing is met
        is_wanted = name in (condition["if"].get("required") or ())
        branch = condition.get("else" if is_wanted else "then", True)
        yield from _with(case_schema({name: False}), branch)


def _with(case: Schema, branch: Any, *, is_object: bool = True) -> Iterator[Schema]:
    """A case with what holds in it; nothing, where nothing does."""
    if branch is True or branch == {}:
        yield case
    elif branch is not False:
        yield {"allOf": [case, of_object(branch) if is_object else branch]}


def _restricted(branch: Any, name: str, values: list[Any]) -> Schema:
    """A branch for some values of a property."""
    one = {"type": "object", "properties": {name: {"enum": values}}, "required": [name]}
    if branch is True or not branch:
        return one
    properties = branch.get("properties") or {}
    if branch.get("type", "object") != "object" or name in properties or "allOf" in branch:
        return {"allOf": [one, branch]}
    required = [*(branch.get("required") or ()), name]
    properties = {**properties, name: {"enum": values}}
    return {**branch, "type": "object", "properties": properties, "required": required}


def _tested(test: Schema) -> tuple[str, list[Any]] | None:
    """The property that a condition looks at, and the values that meet it; None: it is another."""
    properties = test.get("properties") or {}
    others = set(test) - {"properties", "required", "type"} - ANNOTATIONS
    if len(properties) != 1 or others or test.get("type", "object") != "object":
        return None
    ((name, part),) = properties.items()
    is_listed = isinstance(part, dict) and not set(part) - {"const", "enum"} - ANNOTATIONS
    values = values_of(part) if is_listed else None
    if values is None or set(test.get("required") or ()) - {name}:
        return None
    return name, values


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
def exclude(schema: Schema, excluded: Any, path: str) -> None:
    """Takes away from a schema what another allows. Raises GrammarError where that cannot be said,
    NothingLeftError where nothing is left."""
    keys = set(excluded) - ANNOTATIONS if isinstance(excluded, dict) else set()
    if excluded is False:
        return
    values = values_of(excluded) if keys else None
    bounded = bounded_type(keys - {"type"})
    if not keys:
        _leave(schema, "type", [], path)
    elif keys == {"type"}:
        _without_types(schema, excluded["type"], path)
    elif values is not None and not keys - {"const", "enum"}:
        _without_values(schema, values, path)
    elif keys == {"anyOf"}:
        for part in excluded["anyOf"]:
            exclude(schema, part, path)
    elif bounded is not None and isinstance(excluded.get("type", ""), str):
        _without_bounds(schema, excluded, bounded, path)
    else:
        raise GrammarError(
            f"not at {path} can be held where it excludes types, bounds, the values of an enum or"
            " a const, or which properties an object has: say what is allowed in its place"
        )


def _without_bounds(schema: Schema, excluded: Schema, bounded: str, path: str) -> None:
    """Excludes what keeps some bounds: what exceeds them is left, and other types where the
    excluded schema names its own."""
    kind = excluded.get("type")
    bounds = {key: value for key, value in excluded.items() if bounded_type({key})}
    of_type = {"integer": "number"}.get(str(kind), kind)
    if kind is not None and of_type != bounded:  # the bounds say nothing of that type
        _without_types(schema, kind, path)
        return
    own = own_types(schema)
    numeric = {"number", "integer"}
    rest = [name for name in own if name != bounded and not {name, bounded} <= numeric]
    options: list[Schema] = [{"type": rest}] if rest and kind is not None else []
    if rest != own:
        left = "integer" if "integer" in (kind, *own) and bounded == "number" else bounded
        left = "number" if kind == "number" and "number" in own else left
        options += outside(left, bounds)
        if kind == "integer" and "number" in own:
            options += fractions(schema, path)
    _leave(schema, "anyOf", options, path)


def _without_types(schema: Schema, types: Any, path: str) -> None:
    excluded = {types} if isinstance(types, str) else set(types)
    values = values_of(schema)
    if values is not None:
        _leave(schema, "enum", [v for v in values if not types_of_value(v) & excluded], path)
        return
    own = own_types(schema)
    if "number" in own and "integer" in excluded and "number" not in excluded:
        rest = [name for name in own if name not in {"number", *excluded}]
        others: list[Schema] = [{"type": rest}] if rest else []
        add_choice(schema, [*others, *fractions(schema, path)])
        return
    if "number" in excluded:
        excluded.add("integer")
    _leave(schema, "type", [name for name in own if name not in excluded], path)


def _without_values(schema: Schema, excluded: list[Any], path: str) -> None:
    values = _domain(schema)
    if values is not None:
        _leave(schema, "enum", [v for v in values if not is_among(v, excluded)], path)
        return
    own = own_types(schema)
    relevant = [value for value in excluded if types_of_value(value) & set(own)]
    if not relevant:
        return
    if all(value is None for value in relevant):
        _leave(schema, "type", [name for name in own if name != "null"], path)
    elif own == ["integer"] and len(relevant) <= _MAX_HOLES:
        holes = sorted({int(value) for value in relevant})
        _leave(schema, "anyOf", list(_between(holes, schema)), path)
    else:
        raise GrammarError(
            f"not at {path} excludes single values ({shown(relevant[0])}) of what has no enum,"
            " which cannot be held but for whole numbers: list in an enum what is allowed"
        )


def _between(holes: list[int], schema: Schema) -> Iterator[Schema]:
    """Whole numbers below, between and above those that are excluded, as far as they may be."""
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    for low, high in pairwise([-math.inf, *holes, math.inf]):
        if max(low + 1, least) <= min(high - 1, most):
            bounds = {"minimum": low + 1, "maximum": high - 1}
            yield {"type": "integer", **{k: x for k, x in bounds.items() if abs(x) != math.inf}}


def _leave(schema: Schema, key: str, left: list[Any], path: str) -> None:
    """Holds a schema to what is left of its types, values or branches. Raises NothingLeftError."""
    if not left:
        raise NothingLeftError(
            f"not at {path} excludes all that the schema allows there: nothing is left"
        )
    if key == "anyOf":
        add_choice(schema, left)
    elif key == "enum":
        schema.pop("const", None)
        schema["enum"] = left
    else:
        schema["type"] = left[0] if len(left) == 1 else left


# --- uniqueItems ----------------------------------------------------------------------------------
def _unique_items(schema: Schema, path: str) -> None:
    """Arrays of different items out of few, listed one by one."""
    is_wanted = schema.pop("uniqueItems")
    most = schema.get("maxItems")
    if is_wanted is False or (isinstance(most, int) and most < 2):
        return
    values = _domain(schema.get("items"))
    keys = {"type", "items", "minItems", "maxItems"}
    is_alone = not {key for key in schema if not key.startswith("$")} - ANNOTATIONS - keys
    if schema.get("type") == "array" and values is not None and is_alone:
        items = [each for n, each in enumerate(values) if not is_among(each, values[:n])]
        longest = len(items) if most is None else min(most, len(items))
        sizes = range(schema.get("minItems", 0), longest + 1)
        if 0 < sum(math.perm(len(items), size) for size in sizes) <= _MAX_ARRAYS:
            arrays = [list(each) for size in sizes for each in permutations(items, size)]
            for key in keys & set(schema):
                del schema[key]
            schema["enum"] = arrays
            return
    raise GrammarError(
        f"uniqueItems at {path} can be held for an array whose items have an enum of few values (5"
        " of them, or more with a small maxItems): items cannot be compared while an answer is"
        " written, so leave it out or list the items"
    )
