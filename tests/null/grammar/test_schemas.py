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
LEAF = {
    "type": "object",
    "properties": {"t": {"const": "leaf"}},
    "required": ["t"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"t": {"const": "tree"}, "x": {"$ref": "#"}},
    "required": ["t"],
    "additionalProperties": False,
}
ENDLESS = {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "required": ["e"]}
SCHEMAS: dict[str, Any] = {
    "branches that lead back, with annotations": {
        "title": "Part",
        "discriminator": {"propertyName": "t"},
        "x-order": 1,
        "oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"}],
        "$defs": {"leaf": LEAF, "tree": TREE},
    },
    "branches that lead back, with their type": {
        "type": "object",
        "anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"}],
        "$defs": {"leaf": LEAF, "tree": TREE},
    },
    "an endless definition that may be left out": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "e": {"$ref": "#/$defs/e"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"e": ENDLESS},
    },
    "names that are no URIs": {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/Page[Item]"},
            "b": {"$ref": "#/$defs/Map%3Ck,é%3E"},
            "c": {"$ref": "#/$defs/p~1q"},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "$defs": {
            "Page[Item]": {"type": "boolean"},
            "Map<k,é>": {"type": "null"},
            "p/q": {"const": 1},
        },
    },
    "definitions of OpenAPI": {
        "type": "object",
        "properties": {"a": {"$ref": "#/components/schemas/A"}},
        "required": ["a"],
        "additionalProperties": False,
        "components": {
            "schemas": {
                "A": {"oneOf": [{"$ref": "#/components/schemas/B"}, {"type": "null"}]},
                "B": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9},
            }
        },
    },
    "different values of a definition": {
        "type": "array",
        "items": {"$ref": "#/$defs/S"},
        "uniqueItems": True,
        "$defs": {"S": {"enum": ["a", "b", "c"], "title": "S"}},
    },
    "a test of a definition's values": {
        "type": "object",
        "properties": {"k": {"$ref": "#/$defs/K"}, "v": True},
        "required": ["k"],
        "if": {"properties": {"k": {"const": "a"}}},
        "then": {"properties": {"v": {"type": "integer"}}, "required": ["v"]},
        "else": {"properties": {"v": {"type": "null"}}},
        "additionalProperties": False,
        "$defs": {"K": {"enum": ["a", "b"]}},
    },
    "64 bits": {
        "type": "integer",
        "minimum": -9223372036854775808,
        "maximum": 9223372036854775807,
    },
    "bounds of float32": {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38},
    "tiny bounds": {"type": "number", "minimum": -5e-324, "maximum": 1e-300},
    "a tiny bound": {"type": "number", "minimum": 1e-300, "maximum": 2},
    "bounds between floats": {
        "type": "integer",
        "minimum": 9007199254740993,
        "maximum": 9007199254740997,
    },
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
    "a wrong type": (
        {"type": "object", "propertyNames": [1]},
        "propertyNames at # must be a schema, got [1]",
    ),
    "another wrong type": (
        {"oneOf": [{"type": "object", "required": [{}]}, {"type": "object"}]},
        "required at #/oneOf/0 must be a list of strings",
    ),
    "a negative length": (
        {"properties": {"a": {"type": "string", "minLength": -1}}},
        "minLength at #/properties/a must be a whole number of at least 0, got -1",
    ),
    "a bound beyond all floats": (
        {"type": "integer", "minimum": 10**400},
        "a keyword of the schema has a value of the wrong type",
    ),
    "a wrong type in a definition elsewhere": (
        {"$ref": "#/components/a", "components": {"a": {"oneOf": {"type": "null"}}}},
        "oneOf at #/$defs/components/a must be a list",
    ),
    "a negative step": ({"type": "integer", "multipleOf": -1}, "multipleOf at # must be a number"),
    "no branches": ({"items": {"anyOf": []}}, "anyOf at #/items must be a list"),
    "a schema in a test": (
        {"type": "object", "if": {"properties": {"k": "a"}}},
        "properties at #/if must be an object of schemas",
    ),
    "a type of other languages": (
        {"type": "object", "properties": {"a": {"type": "int"}}},
        "type at #/properties/a must be one of string, number",
    ),
    "a keyword that is null": ({"type": "string", "format": None}, "format at # must be a string"),
    "a pattern of other engines": (
        {
            "$ref": "#/$defs/User",
            "$defs": {
                "User": {
                    "type": "object",
                    "properties": {
                        "user": {"$ref": "#/$defs/User"},
                        "zip": {"type": "string", "pattern": "^(?!0)[0-9]{5}$"},
                    },
                }
            },
        },
        "look-around, including look-ahead and look-behind, is not supported at"
        " #/$defs/User/properties/zip",
    ),
    "a reference to nothing": (
        {"properties": {"a": {"$ref": "#/$defs/A"}}},
        "$ref at #/properties/a leads to '#/$defs/A', which the schema does not have",
    ),
    "a reference elsewhere": (
        {"items": {"$ref": "https://example.com/a.json"}},
        "$ref at #/items leads to 'https://example.com/a.json'",
    ),
    "types that exclude each other": (
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        "incompatible types at #",
    ),
    "items that allow nothing": (
        {
            "type": "array",
            "items": {"type": "string", "minLength": 9, "maxLength": 2},
            "minItems": 1,
        },
        "minLength 9 is greater than maxLength 2 at #/items",
    ),
    "an object that needs itself": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "# needs itself, so that no value of it ends",
    ),
    "definitions that need each other": (
        {
            "$ref": "#/$defs/A",
            "$defs": {
                "A": {
                    "type": "object",
                    "properties": {
                        "b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/B"}}
                    },
                    "required": ["b"],
                },
                "B": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            },
        },
        "needs itself, so that no value of it ends",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_its_name(name: str, grammarian: Grammarian) -> None:
    schema, part = REFUSED[name]
    with pytest.raises(GrammarError, match=re.escape(part)):
        grammarian.compiled(json=schema)
