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
            ["so <a>b</a>"],
            ["so", "so <a>b</a> more"],
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
        ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
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
