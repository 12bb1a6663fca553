"""The properties that a JSON schema requires and forbids, as a list of exclusive cases.

`{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}` is a formula over the presence of "a" and
"b". An answer can be held to it as one of two cases: "a" is there and "b" is not, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from math import comb
from typing import Any

from vllmx_core.records import Record

from vllmx_engine.grammar.parts import ANNOTATIONS, NothingLeftError, Schema, add_choice

_MAX_NAMES = 6
"""The most properties of a formula: their presence has 64 combinations."""
_MAX_CASES = 64
Case = dict[str, bool]
"""Presence by property; properties that it does not name may be present or absent."""
Holds = Callable[[frozenset[str]], bool]
"""True if a formula holds for an object with exactly these properties."""


class Formula(Record):
    """A condition on which properties are present."""

    names: frozenset[str]
    """The properties that it speaks of."""
    holds: Holds

    @property
    def holds_of_others(self) -> bool:
        """True if it holds for values other than objects: nothing is required of those."""
        return self.holds(self.names)

    def negated(self) -> Formula:
        """The formula that holds where this one does not."""
        return Formula(self.names, lambda present: not self.holds(present))

    def cases(self, required: frozenset[str] = frozenset()) -> list[Case]:
        """Few cases that cover all combinations for which it holds, given what is there anyway: of
        all cases that it holds in throughout, the widest first, those that cover something new."""
        free, there = sorted(self.names - required), self.names & required
        whole = [
            case
            for case in _combinations(free, (True, False))
            if self.holds(there | {name for name in free if case[name]})
        ]
        found, uncovered = list[Case](), list(whole)
        for case in sorted(_combinations(free, (True, False, None)), key=_width):
            covered = [each for each in whole if case.items() <= each.items()]
            is_sound = len(covered) == 1 << len(free) - len(case)
            if is_sound and any(each in uncovered for each in covered):
                found.append(case)
                uncovered = [each for each in uncovered if each not in covered]
        return found


def _combinations(names: list[str], signs: tuple[bool | None, ...]) -> Iterator[Case]:
    """All cases by the signs of their properties; those of None may be present or absent."""
    for each in product(signs, repeat=len(names)):
        pairs = zip(names, each, strict=True)
        yield {name: sign for name, sign in pairs if sign is not None}


def _width(case: Case) -> tuple[int, list[str], list[str]]:
    present = [name for name, there in case.items() if there]
    return len(case), present, [name for name in case if name not in present]


def formula_of(schema: Any) -> Formula | None:
    """The formula that a schema of an object amounts to; None: it says something else too, or
    speaks of too many properties."""
    if isinstance(schema, bool):
        return Formula(frozenset(), lambda _: schema)
    if not isinstance(schema, dict):
        return None
    formula = _joined(
        all,
        [
            _formula(key, value)
            for key, value in schema.items()
            if key not in ANNOTATIONS and (key, value) != ("type", "object")
        ],
    )
    return formula if formula is not None and len(formula.names) <= _MAX_NAMES else None


def _formula(key: str, value: Any) -> Formula | None:
    """The formula that a keyword amounts to; None: it says something else."""
    if key == "required":
        names = frozenset(value)
        return Formula(names, names.issubset)
    if key == "not":
        inner = formula_of(value)
        return None if inner is None else inner.negated()
    if key in _JOINS:
        return _joined(_JOINS[key], map(formula_of, value))
    if key in ("dependentRequired", "dependencies"):
        return _joined(all, (_dependence(name, names) for name, names in value.items()))
    return None


def _dependence(name: str, others: Any) -> Formula | None:
    if not isinstance(others, list):
        return None
    wanted = frozenset(others)
    return Formula(wanted | {name}, lambda present: name not in present or wanted <= present)


def _joined(
    join: Callable[[Iterator[bool]], bool], found: Iterable[Formula | None]
) -> Formula | None:
    """A formula of several; None if one of them is."""
    parts: list[Formula] = []
    for part in found:
        if part is None:
            return None
        parts.append(part)
    names = frozenset[str]().union(*(part.names for part in parts))
    return Formula(names, lambda present: join(part.holds(present) for part in parts))


_JOINS: dict[str, Callable[[Iterator[bool]], bool]] = {
    "allOf": all,
    "anyOf": any,
    "oneOf": lambda values: sum(values) == 1,
}


def case_schema(case: Case) -> Schema:
    schema: Schema = {"type": "object"}
    if present := [name for name, there in case.items() if there]:
        schema["required"] = present
    if absent := [name for name, there in case.items() if not there]:
        schema["properties"] = dict.fromkeys(absent, False)
    return schema


# --- rewrites -------------------------------------------------------------------------------------
def rewrite_presence(schema: Schema, path: str) -> None:
    """Holds an object to the keywords that speak of nothing but which properties it has."""
    if schema.get("type") == "object":
        for key in _JOINS:
            if key in schema:
                schema[key] = [of_object(branch) for branch in schema[key]]
    for key in ("oneOf", "not", "dependentRequired", "dependencies"):
        formula = _formula(key, schema[key]) if key in schema else None
        if formula is None or not 0 < len(formula.names) <= _MAX_NAMES:
            continue
        if "type" not in schema and not formula.holds_of_others:
            schema["type"] = "object"
        if schema.get("type") == "object":
            del schema[key]
            _hold(schema, formula, key, path)


def of_object(branch: Any) -> Any:
    """A branch of a schema of objects: it need not say what they are."""
    return {"type": "object", **branch} if isinstance(branch, dict) else branch


def _hold(schema: Schema, formula: Formula, key: str, path: str) -> None:
    """Adds a formula to a schema of an object. Raises NothingLeftError where nothing is left."""
    cases = formula.cases(frozenset(schema.get("required") or ()))
    if not cases:
        raise NothingLeftError(
            f"{key} at {path} excludes all that the schema allows there: nothing is left"
        )
    if {} in cases:
        return
    first, *others = map(case_schema, cases)
    if others:
        add_choice(schema, [first, *others])
        return
    if "required" in first:
        schema["required"] = [*(schema.get("required") or ()), *first["required"]]
    if "properties" in first:
        schema["properties"] = {**(schema.get("properties") or {}), **first["properties"]}


def rewrite_counts(schema: Schema, path: str) -> None:
    """Replaces bounds on the number of properties by cases if some are optional: the library
    counts them only if all are required."""
    keys = ("minProperties", "maxProperties")
    bounds: Schema = {key: schema[key] for key in keys if key in schema}
    required = schema.get("required") or ()
    may_lack = any(name not in required for name in schema.get("properties") or ())
    if not bounds or schema.get("type") != "object" or not may_lack:
        return
    cases = _counted(schema, bounds)
    if cases == []:
        raise NothingLeftError(f"{next(iter(bounds))} at {path} leaves no object: nothing is left")
    if cases is not None:
        for key in bounds:
            del schema[key]
        add_choice(schema, cases)


def _counted(schema: Schema, bounds: Schema) -> list[Schema] | None:
    """The cases of an object with a bound number of properties, some of which may lack; None: they
    are too many."""
    required = frozenset(schema.get("required") or ())
    properties = schema.get("properties") or {}
    free = [name for name, part in properties.items() if part is not False and name not in required]
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    least = max(0, bounds.get("minProperties", 0) - len(required))
    has_most = "maxProperties" in bounds
    most = min(bounds["maxProperties"] - len(required) if has_most else len(free), len(free))
    sizes = range(0 if is_open else least, most + 1 if has_most else min(least, len(free)) + 1)
    if sum(comb(len(free), size) for size in sizes) > _MAX_CASES:
        return None
    found: list[Schema] = []
    for size in sizes:
        for there in combinations(free, size):
            is_enough = size >= least and not has_most
            absent = [] if is_enough else [name for name in free if name not in there]
            case = case_schema({**dict.fromkeys(there, True), **dict.fromkeys(absent, False)})
            found.append(case if is_enough or not is_open else {**case, **bounds})
    return found
