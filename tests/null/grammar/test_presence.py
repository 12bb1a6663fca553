"""Schemas that say which properties an object has: just the objects that a validator takes."""

from __future__ import annotations

import json
import random
from itertools import combinations
from typing import Any

import jsonschema
import pytest
from vllmx_core.errors import GrammarError
from vllmx_engine.grammar.presence import formula_of

from .conftest import Grammarian

NAMES = ("a", "b", "c", "d")
OBJECT = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in NAMES},
    "additionalProperties": False,
}
OBJECTS = [
    dict.fromkeys(names, 1) for size in range(len(NAMES) + 1) for names in combinations(NAMES, size)
]
SWITCHES = [{**one, **({"a": value} if "a" in one else {})} for one in OBJECTS for value in (1, 2)]
A, B, C = ({"required": [name]} for name in "abc")
PAIR = {"required": ["a", "b"]}
CASES: dict[str, dict[str, Any]] = {
    "one of two": {"oneOf": [A, B]},
    "one of three": {"oneOf": [A, B, C]},
    "one of overlapping sets": {"oneOf": [PAIR, {"required": ["b", "c"]}], "required": ["b"]},
    "one of nested": {"oneOf": [{"not": A}, {"allOf": [A, B], "title": "both"}]},
    "not two together": {"not": PAIR},
    "neither": {"not": {"anyOf": [A, B]}},
    "dependent": {"dependentRequired": {"a": ["b", "c"], "d": ["a"]}},
    "dependent schemas": {"dependentSchemas": {"a": {"required": ["b"]}, "c": False}},
    "if one is there": {"if": A, "then": B, "else": C},
    "if one is not there": {"if": {"not": A}, "then": {"required": ["d"]}},
    "if, then a limit": {"if": A, "then": {"properties": {"b": {"maximum": 0}}}},
    "several": {"oneOf": [A, B], "dependentRequired": {"c": ["d"]}, "not": {"required": ["d"]}},
    "if among all": {"allOf": [{"if": A, "then": B}, {"if": C, "then": {"not": A}}]},
}


def check(schema: dict[str, Any], objects: list[dict[str, int]], grammarian: Grammarian) -> None:
    """The grammar takes what a validator takes of some objects, and gives nothing else."""
    validator = jsonschema.validators.validator_for(schema)(schema)
    grammar = grammarian.compiled(json=schema, disable_any_whitespace=True)
    for each in objects:
        text = json.dumps(each, separators=(",", ":"))
        assert grammarian.accepts(grammar, text) == validator.is_valid(each), (schema, text)
    for seed in range(4):
        drawn = grammarian.draw(grammar, seed)
        if drawn is not None:
            validator.validate(json.loads(drawn))


@pytest.mark.parametrize("name", CASES)
def test_the_same_objects_are_valid(name: str, grammarian: Grammarian) -> None:
    check({**OBJECT, **CASES[name]}, OBJECTS, grammarian)


def test_dependencies_of_draft_7(grammarian: Grammarian) -> None:
    dependencies = {"a": ["b"], "c": {"properties": {"d": {"maximum": 0}}}}
    draft = "http://json-schema.org/draft-07/schema#"
    check({"$schema": draft, **OBJECT, "dependencies": dependencies}, OBJECTS, grammarian)


@pytest.mark.parametrize("schema", [{"oneOf": [A, B]}, {"not": A}])
def test_a_formula_that_only_objects_meet(schema: dict[str, Any], grammarian: Grammarian) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    grammar = grammarian.compiled(json=schema, disable_any_whitespace=True)
    for each in [None, 1, "a", [], {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}]:
        text = json.dumps(each, separators=(",", ":"))
        assert grammarian.accepts(grammar, text) == validator.is_valid(each), text


@pytest.mark.parametrize("required", [[], ["a"]])
def test_a_condition_on_a_property_that_may_be_missing(
    required: list[str], grammarian: Grammarian
) -> None:
    properties = {**OBJECT["properties"], "a": {"enum": [1, 2]}}
    condition = {"properties": {"a": {"const": 1}}, "required": required}
    schema = {**OBJECT, "properties": properties, "if": condition, "then": B, "else": C}
    check(schema, SWITCHES, grammarian)


def random_formula(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    kind = rng.choice(["required", "not", "allOf", "anyOf", "oneOf"] if depth else ["required"])
    if kind == "required":
        return {kind: rng.sample(NAMES, rng.randint(1, 2))}
    if kind == "not":
        return {kind: random_formula(rng, depth - 1)}
    return {kind: [random_formula(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


@pytest.mark.parametrize("seed", range(40))
def test_formulas_drawn_at_random(seed: int, grammarian: Grammarian) -> None:
    rng = random.Random(seed)
    schema = {**OBJECT, "not": random_formula(rng)}
    if rng.random() < 0.5:
        schema["required"] = rng.sample(NAMES, 1)
    if any(jsonschema.Draft202012Validator(schema).is_valid(each) for each in OBJECTS):
        check(schema, OBJECTS, grammarian)
    else:
        with pytest.raises(GrammarError, match="nothing is left"):
            grammarian.compiled(json=schema)


def test_a_formula_of_many_properties_is_none() -> None:
    assert formula_of({"required": list("abcdef")}) is not None
    assert formula_of({"required": list("abcdefg")}) is None
    assert formula_of({"required": ["a"], "properties": {}}) is None
