"""Schemas with `not`, `if` and `uniqueItems`: just the instances that a validator takes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from vllmx_core.errors import GrammarError

from .conftest import Grammarian

COLORS = ["red", "green", "blue"]
ADDRESS = {
    "type": "object",
    "properties": {
        "country": {"enum": ["US", "CA", "NL"]},
        "code": {"type": "string", "maxLength": 7},
    },
    "required": ["country", "code"],
    "additionalProperties": False,
}
US = {"properties": {"country": {"const": "US"}}, "required": ["country"]}
DIGITS = {"properties": {"code": {"type": "string", "pattern": "^[0-9]{5}$"}}}
LETTERS = {"properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}$"}}}
ADDRESSES = [
    {"country": country, "code": code}
    for country in ("US", "CA", "NL", "FR")
    for code in ("12345", "AB", "x")
]
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"type": "integer"}},
    "required": ["on"],
    "additionalProperties": False,
    "if": {"properties": {"on": {"const": True}}},
    "then": {"required": ["level"]},
}
ANYTHING = [None, True, 0, 3, 1.5, "", "a", [], [1], {}, {"a": 1}]
CASES: dict[str, tuple[Any, list[Any]]] = {
    "not a type": ({"type": ["string", "null", "integer"], "not": {"type": "null"}}, ANYTHING),
    "not types of any": ({"not": {"type": ["object", "array", "number"]}}, ANYTHING),
    "not a type of an enum": ({"enum": ["a", 3, 1.5, None], "not": {"type": "integer"}}, ANYTHING),
    "not null": ({"type": ["boolean", "null"], "not": {"const": None}}, ANYTHING),
    "not values of an enum": ({"enum": COLORS, "not": {"enum": ["red", "x"]}}, [*COLORS, "x"]),
    "not a boolean": ({"type": "boolean", "not": {"const": False}}, [True, False, 0]),
    "not numbers": (
        {"type": "integer", "minimum": 0, "maximum": 6, "not": {"enum": [0, 3, 4, 99, "a"]}},
        list(range(-1, 8)),
    ),
    "not a value of another type": ({"type": "string", "not": {"const": 3}, "maxLength": 2},
                                    ANYTHING),
    "not a property": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "not": {"required": ["a"]}, "additionalProperties": False},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "not nothing": ({"type": "boolean", "not": False}, [True, False]),
    "different colors": (
        {"type": "array", "items": {"enum": COLORS}, "minItems": 1, "uniqueItems": True},
        [[], ["red"], ["red", "red"], ["blue", "red"], ["red", "green", "blue"], ["x"]],
    ),
    "two of many": (
        {"type": "array", "items": {"enum": list(range(15))}, "maxItems": 2, "uniqueItems": True},
        [[], [3], [3, 3], [3, 4], [1, 2, 3]],
    ),
    "different booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        [[], [True], [True, False], [True, True]],
    ),
    "one item": (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "uniqueItems": True},
        [[], [3], [3, 4]],
    ),
    "not unique": (
        {"type": "array", "items": {"const": 1}, "maxItems": 3, "uniqueItems": False},
        [[], [1, 1], [1] * 4],
    ),
    "if, then": ({**ADDRESS, "if": US, "then": DIGITS}, ADDRESSES),
    "if, then, else": ({**ADDRESS, "if": US, "then": DIGITS, "else": LETTERS}, ADDRESSES),
    "if, else": ({**ADDRESS, "if": US, "else": False}, ADDRESSES),
    "several": (
        {**ADDRESS, "allOf": [
            {"if": US, "then": DIGITS},
            {"if": {"properties": {"country": {"const": "CA"}}}, "then": LETTERS},
        ]},
        ADDRESSES,
    ),
    "a switch": (SWITCH, [{"on": True}, {"on": False}, {"on": True, "level": 1},
                          {"on": False, "level": 1}, {"level": 1}]),
    "then alone": ({"type": "boolean", "then": {"const": True}}, [True, False]),
    "nested": (
        {"type": "array", "items": {"type": "integer", "not": {"const": 3}}, "maxItems": 2},
        [[], [2], [3], [2, 3], [4, 4]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_instances_are_valid(name: str, grammarian: Grammarian) -> None:
    schema, instances = CASES[name]
    validator = jsonschema.Draft202012Validator(schema)
    grammar = grammarian.compiled(json=schema, disable_any_whitespace=True)
    for instance in instances:
        text = json.dumps(instance, separators=(",", ":"))
        assert grammarian.accepts(grammar, text) == validator.is_valid(instance), text
    texts = [text for seed in range(6) if (text := grammarian.draw(grammar, seed)) is not None]
    assert texts, "no text ended"
    for text in texts:
        validator.validate(json.loads(text))


REFUSED: dict[str, tuple[Any, str]] = {
    "not a pattern": (
        {"properties": {"a": {"not": {"pattern": "x"}}}},
        "not at #/properties/a can be held where it excludes types",
    ),
    "not a text": ({"type": "string", "not": {"const": "x"}}, "not at # excludes single values"),
    "not whole beside a fraction": (
        {"type": "number", "maximum": 0.5, "not": {"type": "integer"}},
        "whole numbers at # cannot be excluded with the bound 0.5",
    ),
    "nothing": ({"type": "string", "not": {"type": "string"}}, "nothing is left"),
    "not anything": ({"not": {}}, "nothing is left"),
    "no values": ({"enum": ["a"], "not": {"const": "a"}}, "nothing is left"),
    "if a pattern": ({"if": {"pattern": "^a"}, "then": {"minLength": 3}}, "if at #/if can be held"),
    "if a text": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "if": {"properties": {"a": {"const": "x"}}},
            "then": {"required": ["b"]},
        },
        "which can be held where that has an enum",
    ),
    "no case left": (
        {"type": "object", "required": ["a"], "not": {"anyOf": [{"required": ["a"]}]}},
        "nothing is left",
    ),
    "if among all": (
        {"type": "object", "allOf": [{"if": {"propertyNames": {"const": "a"}}, "then": False}]},
        "if at #/allOf/0/if",
    ),
    "unique texts": (
        {
            "properties": {
                "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
            }
        },
        "uniqueItems at #/properties/tags can be held for an array",
    ),
    "unique among many": (
        {"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True},
        "uniqueItems at #",
    ),
    "another keyword": (
        {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}},
        "contains at #/properties/a is a keyword that cannot be held",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_keyword_and_its_place(name: str, grammarian: Grammarian) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        grammarian.compiled(json=schema)
    assert "Unimplemented" not in caught.value.message
