"""Every text that a schema's grammar lets through is valid, over all tokens of a real tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from vllmx_core.errors import GrammarError

from .conftest import Grammarian

POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
SCHEMAS: dict[str, Any] = {
    "anything": {},
    "true": True,
    "integer": {"type": "integer", "minimum": -3, "exclusiveMaximum": 17},
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 99},
    "string": {"type": "string", "minLength": 2, "maxLength": 5},
    "unicode enum": {"enum": ["grün", "красный", "赤", "\U0001f600", 'quo"te', "new\nline", "", 3]},
    "const": {"const": {"a": [1, 2, {"b": None}], "ü": "\u2028"}},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}(x|yz)?$"},
    "loose pattern": {"type": "string", "pattern": "ab+c", "maxLength": 9},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False},
    "two types": {"type": ["string", "null"], "maxLength": 3},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "additional": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "additionalProperties": {"type": "integer"},
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}},
        "additionalProperties": False,
    },
    "odd names": {
        "type": "object",
        "properties": {"a b": {"type": "integer"}, '"': {"type": "null"}, "é\\": {"const": True}},
        "required": ["a b", '"', "é\\"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "user": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
                },
                "required": ["name", "tags"],
            }
        },
        "required": ["user"],
    },
    "reference": {
        "$defs": {"point": POINT},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "any of": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
    "one of types": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "one of tags": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}},
                "required": ["kind", "n"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}, "s": {"type": "string"}},
                "required": ["kind", "s"],
            },
        ]
    },
    "all of": {
        "$defs": {"point": POINT},
        "allOf": [
            {"$ref": "#/$defs/point"},
            {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]},
        ],
    },
    "any of beside properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "anyOf": [
            {"required": ["a"]},
            {"properties": {"b": {"type": "string"}}, "required": ["b"]},
        ],
    },
    "one of ranges": {
        "oneOf": [
            {"type": "integer", "maximum": 3},
            {"type": "integer", "minimum": 5},
            {"type": "array", "maxItems": 1, "items": {"type": "integer"}},
            {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "null"}},
        ]
    },
    "one of required properties": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"b": {"type": "integer"}},
                "required": ["b"],
                "additionalProperties": False,
            },
        ]
    },
    "one of references": {
        "$defs": {
            "kind": {"enum": ["cat", "dog"]},
            "pet": {
                "type": "object",
                "properties": {"kind": {"$ref": "#/$defs/kind"}, "name": {"type": "string"}},
                "required": ["kind", "name"],
            },
            "car": {
                "type": "object",
                "properties": {"kind": {"const": "car"}, "wheels": {"type": "integer"}},
                "required": ["kind"],
            },
        },
        "type": "array",
        "items": {"oneOf": [{"$ref": "#/$defs/pet"}, {"$ref": "#/$defs/car"}, {"type": "null"}]},
        "maxItems": 2,
    },
    "names by a pattern": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^[a-z]{1,3}$"},
        "additionalProperties": {"type": "integer"},
        "maxProperties": 2,
    },
    "names by a list": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "integer"},
    },
    "nothing unevaluated": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "unevaluatedProperties": False,
    },
    "an unknown format": {"type": "string", "format": "colour", "maxLength": 4},
    "definitions of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"id": {"type": "integer", "minimum": 1}},
        "type": "object",
        "properties": {"id": {"$ref": "#/definitions/id"}},
        "required": ["id"],
    },
    "annotations": {
        "title": "T",
        "description": "d",
        "default": 1,
        "examples": [1],
        "type": "integer",
        "$comment": "c",
        "deprecated": True,
        "x-own": {"y": 1},
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_schema_lets_through_is_valid(name: str, grammarian: Grammarian) -> None:
    schema = SCHEMAS[name]
    grammar = grammarian.compiled(json=schema)
    validator = jsonschema.validators.validator_for(schema)(
        schema, format_checker=jsonschema.FormatChecker()
    )
    texts = [text for seed in range(12) if (text := grammarian.draw(grammar, seed)) is not None]
    assert texts, "no text ended"
    for text in texts:
        validator.validate(json.loads(text))


REFUSED: dict[str, tuple[Any, str]] = {
    "branches that overlap": (
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        "oneOf at # has branches that may hold together",
    ),
    "branches with properties that overlap": (
        {
            "type": "array",
            "items": {"oneOf": [{"required": ["a"]}, {"properties": {"b": {"type": "null"}}}]},
        },
        "oneOf at #/items",
    ),
    "branches with what neither may have": (
        {
            "oneOf": [
                {"type": "object", "properties": {"v": False}},
                {"type": "object", "properties": {"v": False, "k": {"const": "x"}}},
            ]
        },
        "oneOf at # has branches that may hold together",
    ),
    "names beside properties": (
        {"type": "object", "properties": {"b": {}}, "propertyNames": {"pattern": "^a"}},
        "propertyNames at #",
    ),
    "an excluded bound that would be let through": (
        {"properties": {"x": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}},
        "the excluded bound 0 at #/properties/x",
    ),
    "dependences of what may be no object": (
        {"dependentRequired": {"a": ["b"]}},
        "dependentRequired",
    ),
    "a wrong type": ({"type": "object", "propertyNames": [1]}, "wrong type"),
    "another wrong type": (
        {"oneOf": [{"type": "object", "required": [{}]}, {"type": "object"}]},
        "wrong type",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_its_name(name: str, grammarian: Grammarian) -> None:
    schema, part = REFUSED[name]
    with pytest.raises(GrammarError, match=re.escape(part)):
        grammarian.compiled(json=schema)
