"""The properties that a JSON schema requires and forbids, as a list of exclusive cases.

`{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}` is a formula over the presence of "a" and
"b". An answer can be held to it as one of two cases: "a" is there and "b" is not, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import combinations
from math import comb
from typing import Any

from vllmx_core.errors import GrammarError

from vllmx_engine.grammar.disjoint import place_of_reference, references, referred

ANNOTATIONS = frozenset(
    (
        *("title", "description", "$comment", "examples", "default", "deprecated", "readOnly"),
        *("writeOnly", "example", "discriminator", "nullable", "xml", "externalDocs"),
    )
)
"""Keywords that hold no value to anything, those of OpenAPI among them."""
_MAX_NAMES = 6
"""The most properties of a formula: their presence has 64 combinations."""
_MAX_CASES = 64
Schema = dict[str, Any]
Case = dict[str, bool]
"""Presence by property; properties that it does not name may be present or absent."""
Holds = Callable[[frozenset[str]], bool]
"""True if a formula holds for an object with exactly these properties."""


class NothingLeftError(GrammarError):
    """A schema allows no value at all. Where it may be left out, it is."""


class Formula:
    """A condition on which properties are present.

    Args:
        names: those that it speaks of.
        holds: whether it holds.
    """

    def __init__(self, names: frozenset[str], holds: Holds) -> None:
        self.names = names
        self.holds = holds

    @property
    def holds_of_others(self) -> bool:
        """True if it holds for values other than objects: nothing is required of those."""
        return self.holds(self.names)

    def negated(self) -> Formula:
        """The formula that holds where this one does not."""
        return Formula(self.names, lambda present: not self.holds(present))

    def cases(self, required: frozenset[str] = frozenset()) -> list[Case]:
        """Few cases that cover all combinations for which it holds, given what is there anyway."""
        free = sorted(self.names - required)
        there = self.names & required
        found = [
            (frozenset(names), frozenset(free) - frozenset(names))
            for size in range(len(free) + 1)
            for names in combinations(free, size)
            if self.holds(frozenset(names) | there)
        ]
        return [
            {**dict.fromkeys(sorted(present), True), **dict.fromkeys(sorted(absent), False)}
            for present, absent in _covering(found)
        ]


def formula_of(schema: Any) -> Formula | None:
    """The formula that a schema of an object amounts to; None: it says something else too, or
    speaks of too many properties."""
    if isinstance(schema, bool):
        return Formula(frozenset(), lambda _: schema)
    if not isinstance(schema, dict):
        return None
    parts: list[Formula] = []
    for key, value in schema.items():
        if key in ANNOTATIONS or (key, value) == ("type", "object"):
            continue
        part = _part(key, value)
        if part is None:
            return None
        parts.append(part)
    formula = _joined(parts, all)
    return formula if len(formula.names) <= _MAX_NAMES else None


def said_by(schema: Schema, key: str) -> Formula | None:
    """The formula that one keyword of a schema amounts to; None: it says something else."""
    formula = _part(key, schema.get(key))
    if formula is None or not 0 < len(formula.names) <= _MAX_NAMES:
        return None
    return formula


def case_schema(case: Case) -> Schema:
    """The schema of the objects of a case."""
    schema: Schema = {"type": "object"}
    if present := [name for name, there in case.items() if there]:
        schema["required"] = present
    if absent := [name for name, there in case.items() if not there]:
        schema["properties"] = dict.fromkeys(absent, False)
    return schema


def hold(schema: Schema, formula: Formula, key: str, path: str) -> None:
    """Adds a formula to a schema of an object. Raises NothingLeftError where nothing is left."""
    cases = formula.cases(frozenset(schema.get("required") or ()))
    if not cases:
        raise NothingLeftError(
            f"{key} at {path} excludes all that the schema allows there: nothing is left"
        )
    if {} in cases:
        return
    if len(cases) > 1:
        branches = [case_schema(case) for case in cases]
        schema["allOf"] = [*(schema.get("allOf") or ()), {"anyOf": branches}]
        return
    (case,) = cases
    present = [name for name, there in case.items() if there]
    absent = [name for name, there in case.items() if not there]
    if present:
        schema["required"] = [*(schema.get("required") or ()), *present]
    if absent:
        schema["properties"] = {**(schema.get("properties") or {}), **dict.fromkeys(absent, False)}


def counted(schema: Schema) -> list[Schema] | None:
    """The cases of an object with a bound number of properties, some of which may lack; None: they
    are too many."""
    required = frozenset(schema.get("required") or ())
    properties = schema.get("properties") or {}
    listed = [name for name, part in properties.items() if part is not False]
    free = [name for name in listed if name not in required]
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    bounds: Schema = {
        key: schema[key] for key in ("minProperties", "maxProperties") if key in schema
    }
    least = max(0, schema.get("minProperties", 0) - len(required))
    has_most = "maxProperties" in schema
    most = min(schema["maxProperties"] - len(required) if has_most else len(free), len(free))
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


def _part(key: str, value: Any) -> Formula | None:
    if key == "required" and isinstance(value, list):
        names = frozenset(value)
        return Formula(names, names.issubset)
    if key == "not":
        inner = formula_of(value)
        return None if inner is None else inner.negated()
    if key in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
        parts = [formula_of(each) for each in value]
        if any(part is None for part in parts):
            return None
        join = {"allOf": all, "anyOf": any, "oneOf": _one}[key]
        return _joined([part for part in parts if part is not None], join)
    is_dependence = key in ("dependentRequired", "dependencies") and isinstance(value, dict)
    if is_dependence and all(isinstance(names, list) for names in value.values()):
        return _joined([_dependence(name, names) for name, names in value.items()], all)
    return None


def _dependence(name: str, others: list[str]) -> Formula:
    wanted = frozenset(others)
    return Formula(wanted | {name}, lambda present: name not in present or wanted <= present)


def _joined(parts: list[Formula], join: Callable[[Iterator[bool]], bool]) -> Formula:
    names = frozenset[str]().union(*(part.names for part in parts))
    return Formula(names, lambda present: join(part.holds(present) for part in parts))


def _one(values: Iterator[bool]) -> bool:
    return sum(values) == 1


_Cube = tuple[frozenset[str], frozenset[str]]


def _covering(cubes: list[_Cube]) -> list[_Cube]:
    """The same combinations in as few cases as a greedy choice finds: Quine and McCluskey's prime
    implicants, the widest first."""
    wanted, primes, level = set(cubes), set[_Cube](), set(cubes)
    while level:
        merged, used = set[_Cube](), set[_Cube]()
        for present, absent in level:
            for name in present:
                other = (present - {name}, absent | {name})
                if other in level:
                    merged.add((present - {name}, absent))
                    used |= {other, (present, absent)}
        primes |= level - used
        level = merged
    chosen: list[_Cube] = []
    for present, absent in sorted(primes, key=lambda c: (len(c[0] | c[1]), *map(sorted, c))):
        covered = {cube for cube in wanted if present <= cube[0] and absent <= cube[1]}
        if covered:
            chosen.append((present, absent))
            wanted -= covered
    return chosen


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
