"""Schemas that are said in other words: the grammar lets through what `jsonschema` finds valid, and
nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from vllmx_core.errors import GrammarError

from .conftest import Grammarian

NULL = {"type": "null"}
NOTHING = {"not": {}}
TOO_LONG = {"type": "string", "minLength": 3, "maxLength": 1}
VALUES: list[Any] = [
    *(None, True, False, -2, -1.5, 0, 1, 2, 2.5, 3, 4.25, 7),
    *("", "a", "b", "abc", "abcd", [], [None], [None, None], [1, None, 2], [2.5]),
    *({}, {"a": None}, {"b": None}, {"a": None, "b": None}, {"a": None, "b": None, "c": None}),
    *({"c": None}, {"a": 1}, {"a": "x"}, {"k": "x"}, {"k": "y"}, {"k": "x", "v": 1}),
    *({"k": "y", "v": 1}, {"v": 1}, {"k": "z"}, {"k": "y", "w": 1}, {"k": "x", "w": 1}, {"b": 1}),
]


def closed(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **keywords,
    }


KEYED = {"k": {"enum": ["x", "y"]}, "v": {"type": "integer"}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "optional, not anything": closed({"a": NOTHING, "b": NULL}),
    "optional, not its own type": closed({"a": {"type": "null", "not": NULL}, "b": NULL}),
    "optional, not its own values": closed({"a": {"enum": [1], "not": {"const": 1}}, "b": NULL}),
    "optional, too long": closed({"a": TOO_LONG, "b": NULL}),
    "optional, too many items": closed({"a": {"type": "array", "minItems": 2, "maxItems": 1}}),
    "optional, too many names": closed(
        {"a": {"type": "object", "minProperties": 2, "maxProperties": 1}, "b": NULL}
    ),
    "optional, no number": closed({"a": {"type": "integer", "minimum": 1.2, "maximum": 1.8}}),
    "optional, no value of its type": closed({"a": {"type": "string", "enum": [1]}, "b": NULL}),
    "optional, types that exclude each other": closed(
        {"a": {"allOf": [NULL, {"type": "integer"}]}, "b": NULL}
    ),
    "optional, what needs nothing": closed(
        {"a": closed({"b": NOTHING}, required=["b"]), "b": NULL}
    ),
    "optional, by reference": {
        "$defs": {"none": NOTHING, "some": closed({"x": {"$ref": "#/$defs/none"}}, required=["x"])},
        **closed({"a": {"$ref": "#/$defs/some"}, "b": NULL, "c": {"$ref": "#/$defs/none"}}),
    },
    "an option that allows nothing": {"anyOf": [TOO_LONG, NULL, {"type": "null", "not": NULL}]},
    "one of nothing and more": {"oneOf": [NOTHING, NULL, TOO_LONG]},
    "items of nothing": {"type": "array", "items": NOTHING},
    "a first item of nothing": {"type": "array", "prefixItems": [{"type": "null"}, NOTHING]},
    "names by a pattern with nothing": {
        "type": "object",
        "patternProperties": {"^a": NOTHING},
        "additionalProperties": NULL,
    },
    "others of nothing": {
        "type": "object",
        "properties": {"a": NULL},
        "additionalProperties": NOTHING,
    },
    "a name that needs a missing one": closed(
        {"a": NULL, "b": NULL}, dependentRequired={"a": ["x"]}
    ),
    "one type of two is impossible": {"type": ["string", "null"], "minLength": 3, "maxLength": 1},
    "whole beside any": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "whole beside any, and null": {
        "oneOf": [{"type": ["integer", "null"]}, {"type": "number"}, {"type": "string"}]
    },
    "whole beside any, by reference": {
        "$defs": {"n": {"type": "number"}},
        "oneOf": [{"type": "integer"}, {"$ref": "#/$defs/n"}],
    },
    "ranges that overlap": {
        "oneOf": [{"type": "integer", "minimum": 0}, {"type": "number", "maximum": 2}]
    },
    "lengths that overlap": {
        "oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 1}]
    },
    "sizes that overlap": {
        "oneOf": [{"type": "array", "maxItems": 2}, {"type": "array", "minItems": 1}]
    },
    "values that overlap": {"oneOf": [{"enum": [1, "a"]}, {"enum": ["a", "b"]}, {"const": None}]},
    "a value of a type": {"oneOf": [{"type": "boolean"}, {"const": True}]},
    "oneOf beside anyOf": {
        "anyOf": [{"type": "integer"}, NULL],
        "oneOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 1}, NULL],
    },
    "told apart by an optional value": {
        "oneOf": [{"properties": {"k": {"enum": ["x"]}}}, {"properties": {"k": {"enum": ["y"]}}}]
    },
    "three told apart by an optional value": {
        "type": "object",
        "oneOf": [{"properties": {"k": {"const": each}}} for each in "xyz"],
    },
    "one told apart must have it": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "y"}}},
        ]
    },
    "told apart by what one may not have": {
        "oneOf": [closed({"k": False, "v": NULL}), closed({"k": {"const": "x"}})]
    },
    "if without a type": {
        "properties": KEYED,
        "if": {"properties": {"k": {"const": "x"}}},
        "then": {"required": ["v"]},
    },
    "if something is there, without a type": {
        "properties": KEYED,
        "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
        "then": {"required": ["v"]},
        "else": {"properties": {"v": False}},
    },
    "if an object, without a type": {
        "properties": KEYED,
        "if": {"type": "object", "properties": {"k": {"const": "x"}}},
        "then": {"required": ["v"]},
        "else": NULL,
    },
    "if a name is there, without a type": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "if of two types": {
        "type": ["object", "null"],
        "properties": KEYED,
        "additionalProperties": False,
        "if": {"properties": {"k": {"const": "x"}}},
        "then": {"required": ["v"]},
    },
    "if a type": {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": "integer"}},
    "if a type of few": {
        "type": ["string", "integer"],
        "if": {"type": "integer"},
        "then": {"minimum": 2},
    },
    "if bounds": {"type": "integer", "if": {"minimum": 2}, "then": {"const": 7}},
    "if a value of few": {"enum": [1, "a", None], "if": {"type": "string"}, "then": {"const": "b"}},
    "if among all, without a type": {
        "allOf": [
            {"if": {"type": "string"}, "then": {"minLength": 2}},
            {"type": ["string", "null"]},
        ]
    },
    "if by reference": {
        "$defs": {"s": {"type": "string"}},
        "if": {"$ref": "#/$defs/s"},
        "then": {"const": "abc"},
        "else": {"type": "boolean"},
    },
    "not by reference": {"$defs": {"s": {"type": "string"}}, "not": {"$ref": "#/$defs/s"}},
    "not whole": {"type": ["number", "null"], "not": {"type": "integer"}},
    "not a length": {"type": ["string", "null"], "not": {"minLength": 1, "maxLength": 3}},
    "not some strings": {"type": ["string", "null"], "not": {"type": "string", "maxLength": 3}},
    "not a range": {"type": "integer", "not": {"minimum": 0, "exclusiveMaximum": 3}},
    "not a range of all": {"type": "number", "not": {"type": "number", "exclusiveMinimum": 0}},
    "not short": {"type": "array", "items": NULL, "not": {"maxItems": 1}},
    "not empty": {"type": "object", "additionalProperties": NULL, "not": {"maxProperties": 0}},
    "not any of": {"not": {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}},
    "at least one name": closed({"a": NULL, "b": NULL}, minProperties=1),
    "at most one name": closed({"a": NULL, "b": NULL}, maxProperties=1),
    "two names, one known": closed(
        {"a": NULL, "b": NULL, "c": NULL}, minProperties=2, required=["a"]
    ),
    "at least one name of any": {
        "type": "object",
        "properties": {"a": NULL},
        "additionalProperties": NULL,
        "minProperties": 1,
    },
    "one name of any": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL},
        "minProperties": 1,
        "maxProperties": 1,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_grammar_allows_what_is_valid(name: str, grammarian: Grammarian) -> None:
    schema = SCHEMAS[name]
    grammar = grammarian.compiled(json=schema, disable_any_whitespace=True)
    validator = jsonschema.Draft202012Validator(schema)
    for value in VALUES:
        text = json.dumps(value, separators=(",", ":"))
        assert grammarian.accepts(grammar, text) == validator.is_valid(value), text
    drawn = [text for seed in range(4) if (text := grammarian.draw(grammar, seed)) is not None]
    for text in drawn:
        validator.validate(json.loads(text))


REFUSED: dict[str, tuple[Any, str]] = {
    "a length": (TOO_LONG, "minLength 3 is greater than maxLength 1 at #/properties/a"),
    "items": (
        {"type": "array", "minItems": 2, "maxItems": 1},
        "minItems 2 is greater than maxItems 1 at #/properties/a",
    ),
    "no items": (
        {"type": "array", "items": False, "minItems": 1},
        "minItems 1 is greater than the 0 items allowed at #/properties/a",
    ),
    "names": (
        closed({"b": NULL}, minProperties=2),
        "minProperties at #/properties/a leaves no object",
    ),
    "too many required names": (
        {"type": "object", "required": ["x", "y"], "maxProperties": 1},
        "required at #/properties/a names more properties than maxProperties 1",
    ),
    "a name that is excluded": (
        closed({}, required=["x"]),
        "required at #/properties/a names the property 'x', which the schema excludes",
    ),
    "a number": (
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        "exclusiveMinimum 1 and maximum 1 leave no number at #/properties/a",
    ),
    "a whole number": (
        {"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5},
        "multipleOf 5 leave no whole number at #/properties/a",
    ),
    "values": ({"enum": []}, "enum at #/properties/a has no value"),
    "a value": ({"const": 1, "enum": [2]}, "const at #/properties/a is not in its enum"),
    "not": ({"type": "string", "not": {"type": "string"}}, "not at #/properties/a excludes all"),
    "false": (False, "required at # names the property 'a', which the schema excludes"),
    "types": (
        {"allOf": [NULL, {"type": "integer"}]},
        "required at # names the property 'a', whose schema allows nothing",
    ),
    "all options": ({"anyOf": [TOO_LONG, NOTHING]}, "at #/properties/a/anyOf/0: nothing is left"),
    "what is inside": (
        closed({"b": TOO_LONG}, required=["b"]),
        "minLength 3 is greater than maxLength 1 at #/properties/a/properties/b",
    ),
    "no branch alone": ({"oneOf": [NULL, NULL]}, "oneOf at #/properties/a has no branch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_must_be_there_and_cannot_is_refused_by_place(
    name: str, grammarian: Grammarian
) -> None:
    schema, said = REFUSED[name]
    with pytest.raises(GrammarError, match=re.escape(said)):
        grammarian.compiled(json=closed({"a": schema, "b": NULL}, required=["a"]))
    assert grammarian.accepts(
        grammarian.compiled(json=closed({"a": schema, "b": NULL}), disable_any_whitespace=True),
        '{"b":null}',
    )
