"""Free text with parts that follow schemas."""

from __future__ import annotations

import re
from typing import Any

import pytest
from vllmx_core.errors import GrammarError
from vllmx_engine.formats.call_grammar import must_call
from vllmx_models.output_formats import HERMES

from .conftest import Grammarian

ARGS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": ARGS, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("no call at all", True),
        ('I call <function=f>{"n": 1}</function>', True),
        ('<function=f>{"n": 1}</function> and <function=g>7</function> done', True),
        ('<function=f>{"m": 1}</function>', False),
        ("<function=g>x</function>", False),
        ("<function=h>1</function>", False),
        ('<function=f>{"n": 1}', False),
        ("a < b and <function", True),
    ],
)
def test_a_part_follows_its_schema_from_its_trigger_on(
    text: str, allowed: bool, grammarian: Grammarian
) -> None:
    grammar = grammarian.compiled(structural_tag=OLDER)
    assert grammarian.accepts(grammar, text) == allowed


def form(**fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": fields}


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (form(**TAG), ["<a></a>", "<a>x\ny</a>"], ["<a>", "<a></a>x", "x<a></a>"]),
        (
            form(
                type="sequence",
                elements=[
                    {"type": "const_string", "value": "n="},
                    {"type": "regex", "pattern": r"\d+"},
                    {"type": "or", "elements": [TAG, {"type": "const_string", "value": "!"}]},
                ],
            ),
            ["n=12!", "n=3<a>b</a>"],
            ["n=!", "n=1", "12!"],
        ),
        (
            form(
                type="triggered_tags",
                triggers=["<a"],
                tags=[TAG],
                at_least_one=True,
                stop_after_first=True,
            ),
            ["<a>b</a>"],
            ["so", "so <a>b</a>", "<a>b</a> more"],
        ),
        (
            form(
                type="tag",
                begin="<|im_start|>",
                content={"type": "json_schema", "json_schema": ARGS},
                end="",
            ),
            ['<|im_start|>{"n": 3}'],
            ['{"n": 3}'],
        ),
    ],
)
def test_forms_are_composed(
    tag: dict[str, Any], good: list[str], bad: list[str], grammarian: Grammarian
) -> None:
    grammar = grammarian.compiled(structural_tag=tag)
    assert [text for text in good if not grammarian.accepts(grammar, text)] == []
    assert [text for text in bad if grammarian.accepts(grammar, text)] == []


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def token(name: str | int) -> dict[str, Any]:
    return {"type": "token", "token": name}


ANY = {"type": "any_text"}
DIGIT = {"type": "regex", "pattern": "^[0-9]$"}
MARKED = {"type": "tag", "begin": "<n>", "content": DIGIT, "end": ["</n>", ";"]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age"],
}
FORMS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "gbnf": (
        {"type": "grammar", "grammar": 'root ::= ("yes" | no){2}\nno ::= "no"'},
        ["yesno", "nono"],
        ["yes", "yesnono"],
    ),
    "two grammars": (
        {
            "type": "sequence",
            "elements": [
                {"type": "grammar", "grammar": 'root ::= "(" root? ")"'},
                {"type": "grammar", "grammar": "start: WORD\nWORD: /[a-z]+/"},
                {"type": "grammar", "grammar": 'root ::= "[" root? "]"'},
            ],
        },
        ["(())ab[[]]", "()x[]"],
        ["(ab[]", "()[]", "()a[()]"],
    ),
    "optional": (
        {"type": "sequence", "elements": [{"type": "optional", "content": MARKED}, text("!")]},
        ["!", "<n>1</n>!"],
        ["", "<n>1</n><n>1</n>!"],
    ),
    "plus": ({"type": "plus", "content": MARKED}, ["<n>1;", "<n>1</n><n>2;"], ["", "<n>1"]),
    "star": ({"type": "star", "content": text("ab")}, ["", "abab"], ["aba"]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": DIGIT}, ["1", "12"], ["", "123"]),
    "repeat without end": (
        {"type": "repeat", "min": 2, "max": -1, "content": DIGIT},
        ["12", "12345"],
        ["1"],
    ),
    "several ends": (
        {"type": "sequence", "elements": [{**TAG, "end": ["</a>", "</b>", "."]}, text("!")]},
        ["<a>x</a>!", "<a></b>!", "<a>x.!"],
        ["<a>x</a>y</b>!", "<a>x.y</a>!", "<a>!"],
    ),
    "texts left out": (
        {"type": "tag", "begin": "(", "content": {**ANY, "excludes": ["no", "//"]}, "end": ")"},
        ["(yes / n o)", "()"],
        ["(no)", "(x//y)"],
    ),
    "free text before a fixed text": (
        {"type": "sequence", "elements": [ANY, text("="), DIGIT, ANY, {**TAG}, text("!")]},
        ["n is =1 so <a>b</a>!", "=1<a></a>!"],
        ["n is 1<a></a>!", "a=x=1<a></a>!"],
    ),
    "tags inside of a tag": (
        {
            "type": "tag",
            "begin": "<t>",
            "content": {"type": "triggered_tags", "triggers": ["<n"], "tags": [MARKED]},
            "end": "</t>",
        },
        ["<t>a<n>1;b<n>2</n>c</t>", "<t></t>", "<t>a</t>"],
        ["<t><n>x;</t>", "<t><n>1;", "<t>a</t>b"],
    ),
    "triggered tags without some texts": (
        {"type": "triggered_tags", "triggers": ["<n"], "tags": [MARKED], "excludes": ["no"]},
        ["a<n>1;b", "a"],
        ["no", "a<n>1;no", "no<n>1;"],
    ),
    "two tags of one trigger, the first at once": (
        {
            "type": "triggered_tags",
            "triggers": ["<n", "<a"],
            "tags": [MARKED, {**MARKED, "begin": "<nn>"}, TAG],
            "at_least_one": True,
        },
        ["<n>1;", "<nn>1;x<n>2; y<a></a>"],
        ["x<n>1;", "", "<a"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["n=", DIGIT], ["t=", text("x")]]},
        ["", "a n=1 t=xn=2 b"],
        ["n=x", "a t=1"],
    ),
    "dispatch once": (
        {"type": "dispatch", "rules": [["n=", DIGIT]], "loop": False, "excludes": ["q"]},
        ["a n=1", "a"],
        ["n=1 b", "q"],
    ),
    "tokens": (
        {
            "type": "tag",
            "begin": token("<|im_start|>"),
            "content": {"type": "any_tokens"},
            "end": token("<|im_start|>"),
        },
        ["<|im_start|>some text<|im_start|>", "<|im_start|><|im_start|>"],
        ["<|im_start|>some", "a<|im_start|>b<|im_start|>", "<|im_start|>a<|im_start|>b"],
    ),
    "text before a token": (
        {"type": "tag", "begin": "<a>", "content": ANY, "end": token("<|im_start|>")},
        ["<a>some text<|im_start|>"],
        ["<a>some text", "<a>b<|im_start|>c"],
    ),
    "a text that ends with a token": (
        {"type": "tag", "begin": "", "content": ANY, "end": "\n<|im_start|>"},
        ["a\nb\n<|im_start|>", "\n<|im_start|>"],
        ["a<|im_start|>", "a\n"],
    ),
    "tokens left out": (
        {"type": "sequence", "elements": [{"type": "exclude_token", "exclude_tokens": [1]}, DIGIT]},
        ["a1", "11"],
        ["<|im_start|>1", "1"],
    ),
    "tags by tokens": (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": ["<|im_start|>"],
            "tags": [{"begin": token(1), "content": DIGIT, "end": ";"}],
        },
        ["some text", "a<|im_start|>1;b<|im_start|>2;"],
        ["<|im_start|>x;", "<|im_start|>1"],
    ),
    "dispatch by tokens": (
        {"type": "token_dispatch", "rules": [["<|im_start|>", DIGIT]], "loop": False},
        ["some text", "a<|im_start|>1"],
        ["<|im_start|>x", "<|im_start|>1b"],
    ),
    "parameters of qwen": (
        {"type": "qwen_xml_parameter", "json_schema": PERSON},
        [
            "<parameter=name>Bob</parameter><parameter=age>\t100\n</parameter>",
            "<parameter=name>a\n<b></parameter>\n<parameter=age>1</parameter>"
            "<parameter=kind>b</parameter>",
        ],
        [
            "<parameter=name>Bob</parameter>",
            "<parameter=name>Bob</parameter><parameter=age>x</parameter>",
            "<parameter=name>B</parameter><parameter=age>1</parameter><parameter=kind>c</parameter>",
        ],
    ),
    "parameters of deepseek": (
        {
            "type": "json_schema",
            "style": "deepseek_xml",
            "json_schema": {**PERSON, "additionalProperties": {"type": "boolean"}},
        },
        [
            '<｜DSML｜parameter name="name" string="true">B</｜DSML｜parameter>'
            '<｜DSML｜parameter name="age" string="false">1</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="is_x" string="false">true</｜DSML｜parameter>',
        ],
        ['<｜DSML｜parameter name="name" string="false">B</｜DSML｜parameter>'],
    ),
    "parameters of glm": (
        {"type": "json_schema", "style": "glm_xml", "json_schema": PERSON},
        [
            "<arg_key>name</arg_key><arg_value>x</arg_value>"
            "<arg_key>age</arg_key><arg_value>2</arg_value>"
        ],
        ["<arg_key>name</arg_key><arg_value>x</arg_value>", ""],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_all_types_of_xgrammar_are_served(name: str, grammarian: Grammarian) -> None:
    tag, good, bad = FORMS[name]
    grammar = grammarian.compiled(structural_tag={"type": "structural_tag", "format": tag})
    assert [one for one in good if not grammarian.accepts(grammar, one)] == []
    assert [one for one in bad if grammarian.accepts(grammar, one)] == []


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ({"type": "repeat", "min": 3, "max": 2, "content": DIGIT}, "repeat has a min of 3"),
        ({"type": "repeat", "min": True, "max": 2, "content": DIGIT}, "repeat has a min of True"),
        (token("several words"), "no single token 'several words'"),
        (token(5000), "no single token 5000"),
        ({"type": "grammar", "grammar": "root ::= x"}, "line 1, column 10: there is no rule 'x'"),
        ({"type": "json_schema", "json_schema": {}, "style": "odd"}, "no style 'odd': use json,"),
        ({"type": "or", "elements": []}, "a choice of nothing"),
        ({**TAG, "end": []}, "the tag '<a>' has no end"),
        ({**TAG, "begin": text("<a>")}, "a tag begins and ends with texts and tokens"),
    ],
)
def test_what_is_wrong_in_a_tag_is_named(
    tag: dict[str, Any], said: str, grammarian: Grammarian
) -> None:
    with pytest.raises(GrammarError, match=re.escape(said)):
        grammarian.compiled(structural_tag=form(**tag))


@pytest.mark.parametrize(
    "tag",
    [
        {},
        {"structures": [], "triggers": []},
        {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]},
        {"structures": [{"begin": 5, "schema": {}, "end": ""}], "triggers": ["<b"]},
        {"structures": OLDER["structures"] * 200, "triggers": ["<function="]},
        {"format": {"type": "unknown"}},
        {"format": [1]},
        {"format": {"type": "json_schema", "json_schema": {"not": {}}}},
    ],
)
def test_what_is_no_structural_tag_is_refused(tag: Any, grammarian: Grammarian) -> None:
    with pytest.raises(GrammarError):
        grammarian.compiled(structural_tag=tag)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"contains": {"type": "integer"}}, "contains at #/properties/a is a keyword"),
        ({"type": "object", "required": "a"}, "required at #/properties/a must be a list"),
        ({"$ref": "#/nowhere"}, "'#/nowhere', which the schema does not have"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ],
)
def test_a_schema_that_cannot_be_held_is_named(
    schema: dict[str, Any], said: str, grammarian: Grammarian
) -> None:
    """Of several calls the one at fault, without the grammar that was made of them."""
    tools = {name: {"type": "object", "properties": {}} for name in ("good", "fine")}
    tools["bad"] = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(GrammarError, match=re.escape(said)) as caught:
        grammarian.compiled(structural_tag=must_call(HERMES, tools))
    assert '"bad"' in caught.value.message
    assert " | " not in caught.value.message
