"""Grammars of forced calls accept what a format writes, and nothing that breaks a schema."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllmx_core.output_format import OutputFormat
from vllmx_core.specs import ParserSpec
from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.client.forced_calls import told_tools
from vllmx_engine.formats.call_grammar import may_call, must_call
from vllmx_engine.formats.writer import WrittenCall, write_answer
from vllmx_models.parsers import PARSERS

from .conftest import Grammarian

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
GOOD = [
    WrittenCall("weather", {"city": "Göteborg <b>", "days": 2}, "abcdef001"),
    WrittenCall("now", {}, "abcdef002"),
    WrittenCall("weather", {"city": "x", "days": -1, "unit": "f", "exact": True}, "abcdef003"),
]
BAD = [
    WrittenCall("when", {}, "abcdef001"),
    WrittenCall("weather", {"city": "x"}, "abcdef001"),
    WrittenCall("weather", {"city": "x", "days": "two"}, "abcdef001"),
    WrittenCall("weather", {"city": "x", "days": 1, "unit": "k"}, "abcdef001"),
]
FORMATS = [spec for spec in PARSERS if spec.load().calls is not None]


@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_forced_calls(spec: ParserSpec, grammarian: Grammarian) -> None:
    made_of: OutputFormat = spec.load()
    grammar = grammarian.compiled(structural_tag=must_call(made_of, TOOLS))
    several = [] if made_of.name == "gigachat" else [GOOD]
    for calls in (GOOD[:1], GOOD[1:2], GOOD[2:], *several):
        text = write_answer(made_of, calls=calls)
        assert grammarian.accepts(grammar, text), text
        if made_of.thinking is not None:
            thought = made_of.thinking.begin.strip() + "so <b>" + made_of.thinking.end.strip()
            assert grammarian.accepts(grammar, thought + text), text
    for call in BAD:
        assert not grammarian.accepts(grammar, write_answer(made_of, calls=[call])), call
    assert not grammarian.accepts(grammar, "I would rather talk")
    assert not grammarian.accepts(grammar, "")


@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_free_answers_whose_calls_are_right(spec: ParserSpec, grammarian: Grammarian) -> None:
    made_of: OutputFormat = spec.load()
    tag = may_call(made_of, TOOLS)
    if made_of.calls is not None and made_of.calls.is_bare:
        assert tag is None
        return
    grammar = grammarian.compiled(structural_tag=tag)
    assert grammarian.accepts(grammar, "I would rather talk")
    assert grammarian.accepts(grammar, write_answer(made_of, content="Look", calls=GOOD[:1]))
    for call in BAD:
        assert not grammarian.accepts(grammar, write_answer(made_of, calls=[call])), call


@pytest.mark.parametrize("spec", PARSERS, ids=lambda spec: spec.name)
def test_the_prompt_tells_of_tools_that_a_grammar_can_hold_back(spec: ParserSpec) -> None:
    made_of: OutputFormat = spec.load()
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    chat = ChatOptions(tools=tools, allowed_tools=("b",))
    is_held = may_call(made_of, TOOLS) is not None
    assert told_tools(made_of, chat) == (tools if is_held else tools[1:])
    assert told_tools(made_of, replace(chat, tool_choice="required")) == tools


def test_one_call_at_most(grammarian: Grammarian) -> None:
    made_of: OutputFormat = FORMATS[0].load()
    grammar = grammarian.compiled(structural_tag=must_call(made_of, TOOLS, one_call=True))
    assert grammarian.accepts(grammar, write_answer(made_of, calls=GOOD[:1]))
    assert not grammarian.accepts(grammar, write_answer(made_of, calls=GOOD[:2]))


def test_channels(grammarian: Grammarian) -> None:
    spec = next(spec for spec in PARSERS if spec.name == "harmony")
    grammar = grammarian.compiled(structural_tag=must_call(spec.load(), TOOLS))
    call = (
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 1}<|call|>'
    )
    thoughts = "<|channel|>analysis<|message|>I look<|end|><|start|>assistant"
    assert grammarian.accepts(grammar, call)
    assert grammarian.accepts(grammar, thoughts + call)
    assert not grammarian.accepts(grammar, thoughts)
    assert not grammarian.accepts(grammar, call.replace("Oslo", 'Oslo", "x": "'))
