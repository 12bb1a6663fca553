"""What is taken as a grammar, what is refused, and how it is told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from vllmx_core.errors import GrammarError, InvalidRequestError
from vllmx_core.structured import StructuredOutputsParams
from vllmx_engine.grammar.spec import grammar_spec

from .conftest import Grammarian

CHOICES = ["yes", 'quo"te', "two\nlines", "back\\slash", "ünï", "\U0001f600", "a/b", " lead"]


def draws(grammarian: Grammarian, **form: Any) -> set[str]:
    grammar = grammarian.compiled(**form)
    return {text for seed in range(40) if (text := grammarian.draw(grammar, seed)) is not None}


def test_a_choice_is_one_of_its_texts(grammarian: Grammarian) -> None:
    found = draws(grammarian, choice=CHOICES)
    assert found <= set(CHOICES)
    assert len(found) > len(CHOICES) // 2


@pytest.mark.parametrize(
    "regex", [r"\d{3}-[a-f]+", r"^(cat|dog)s?$", r"[^\"/]{2,4}/x", r"ä{1,3}|é", r"a\.b\$"]
)
def test_the_whole_answer_matches_a_regular_expression(regex: str, grammarian: Grammarian) -> None:
    found = draws(grammarian, regex=regex)
    assert found
    assert all(re.fullmatch(regex, text) for text in found)


def test_grammars_in_lark_and_in_gbnf(grammarian: Grammarian) -> None:
    lark = 'start: greeting " " NAME\ngreeting: "Hello" | "Bye"\nNAME: /[A-Z][a-z]{1,5}/'
    gbnf = 'root ::= greeting " " name  # as llama.cpp has it\ngreeting ::= "Hello" | "Bye"\n'
    gbnf += "name ::= [A-Z] [a-z]{1,5}\n"
    for text in (lark, gbnf):
        found = draws(grammarian, grammar=text)
        assert found
        assert all(re.fullmatch("(Hello|Bye) [A-Z][a-z]{1,5}", text) for text in found)


def test_json_objects(grammarian: Grammarian) -> None:
    found = draws(grammarian, json_object=True)
    assert found
    assert all(isinstance(json.loads(text), dict) for text in found)


LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}


def test_blanks_are_bounded_and_compact_json_has_none(grammarian: Grammarian) -> None:
    assert not any(re.search(r"\s{23}", text) for text in draws(grammarian, json=LIST))
    compact = draws(grammarian, json=LIST, disable_any_whitespace=True)
    assert compact
    assert not any(re.search(r"\s", text) for text in compact)
    own = draws(grammarian, json=LIST, whitespace_pattern="\t")
    assert any("\t" in text for text in own)
    assert not any(" " in text or "\n" in text for text in own)


def test_a_schema_does_not_choose_how_it_is_held(grammarian: Grammarian) -> None:
    sneaky = LIST | {"x-guidance": {"whitespace_pattern": "[ ]+", "lenient": True}}
    assert not any(re.search(r"\s{23}", text) for text in draws(grammarian, json=sneaky))


def test_text_of_a_schema_is_as_good_as_the_schema() -> None:
    specs = [grammar_spec(StructuredOutputsParams(json=form)) for form in (LIST, json.dumps(LIST))]
    assert specs[0].digest == specs[1].digest


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ({"regex": "((("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"json": {"type": "integer", "minimum": 9, "maximum": 3}}, "greater than maximum"),
        ({"json": {"type": "nothing"}}, "nothing"),
        ({"json": {"$ref": "http://127.0.0.1:9/schema.json"}}, "127.0.0.1"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "passwd"),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "needs itself"),
        ({"json": {"$ref": "#"}}, "# needs itself"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"pattern": "a"}}}, "not at #"),
        ({"json": {"if": {"pattern": "a"}, "then": {"minLength": 3}}}, "if at #/if"),
        ({"json": False}, "object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "object"),
        ({"grammar": "start: unknown"}, "unknown"),
        ({"grammar": 'root ::= "a'}, "GBNF"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
        ({"grammar": "start: start | start"}, "no text satisfies it"),
    ],
)
def test_refusals_name_what_is_wrong(
    form: dict[str, Any], part: str, grammarian: Grammarian
) -> None:
    with pytest.raises(GrammarError, match=re.escape(part)) as caught:
        grammarian.compiled(**form)
    assert len(caught.value.message) < 600
    assert "<state>" not in caught.value.message


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"json": {}, "regex": "a"},
        {"regex": 5},
        {"regex": ""},
        {"regex": "a" * ((1 << 18) + 1)},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["a", 1]},
        {"choice": ["a"] * 4097},
        {"choice": ["a" * 1000] * 1000},
        {"regex": "a", "after_ids": tuple(range(65))},
    ],
)
def test_forms_are_checked_at_once(form: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**form)
    assert caught.value.param == "structured_outputs"


def test_large_or_deep_schemas_are_no_json_of_ours() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for schema in (deep, {"enum": ["x" * 1000] * 600}):
        with pytest.raises(GrammarError):
            grammar_spec(StructuredOutputsParams(json=schema))


def test_a_schema_may_be_as_deep_as_its_check_takes(grammarian: Grammarian) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    grammar = grammarian.compiled(json=json.dumps(schema))
    assert grammarian.accepts(grammar, '{"a":' * 60 + "5" + "}" * 60)
    with pytest.raises(GrammarError, match="levels of objects and lists"):
        grammarian.compiled(json={"items": {"items": schema}})
