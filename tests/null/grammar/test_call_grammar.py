"""Grammars of forced calls accept what a format writes, and nothing that breaks a schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from vllmx_core.output_format import OutputFormat
from vllmx_core.plugins.specs import ParserSpec
from vllmx_core.sampling import SamplingParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.client.forced_calls import told_tools, with_calls
from vllmx_engine.formats.call_grammar import may_call, must_call
from vllmx_engine.formats.writer import WrittenCall
from vllmx_engine.grammar.vocabulary import Lexicon, vocabulary_of
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_models.output_formats import KIMI3
from vllmx_models.parsers import PARSERS

from tests.written_answers import write_answer

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


def written(made_of: OutputFormat, calls: Sequence[WrittenCall]) -> str:
    """Calls behind a prompt that ends with the beginning of the first message."""
    return write_answer(made_of, calls=calls).removeprefix(made_of.opened)


FORMATS = [spec for spec in PARSERS if spec.load().calls is not None]


@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_forced_calls(spec: ParserSpec, grammarian: Grammarian) -> None:
    made_of: OutputFormat = spec.load()
    grammar = grammarian.compiled(structural_tag=must_call(made_of, TOOLS))
    several = [] if made_of.name == "gigachat" else [GOOD]
    for calls in (GOOD[:1], GOOD[1:2], GOOD[2:], *several):
        text = write_answer(made_of, calls=calls)
        assert grammarian.accepts(grammar, written(made_of, calls)), text
        if made_of.thinking is not None:
            thought = made_of.thinking_begin.strip() + "so <b>" + made_of.thinking.end.strip()
            assert grammarian.accepts(grammar, thought + text), text
    for call in BAD:
        assert not grammarian.accepts(grammar, written(made_of, [call])), call
    assert not grammarian.accepts(grammar, "I would rather talk")
    assert not grammarian.accepts(grammar, "")


@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_free_answers_whose_calls_are_right(spec: ParserSpec, grammarian: Grammarian) -> None:
    made_of: OutputFormat = spec.load()
    tag = may_call(made_of, TOOLS)
    if made_of.calls is not None and (made_of.calls.is_bare or made_of.opened):
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


HARMONY = next(spec for spec in PARSERS if spec.name == "harmony").load()
THOUGHTS = "<|channel|>analysis<|message|>I look<|end|><|start|>assistant"
CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 1}<|call|>'
)


def grammarian_of(folder: Path, specials: list[str], ends: list[str]) -> Grammarian:
    """One of the demo's tokens and some special ones, which no text spells."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    backend.add_special_tokens([*specials, *ends])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    ids = [backend.token_to_id(end) for end in ends]
    return Grammarian(tokenizer, Lexicon.of(vocabulary_of(tokenizer, tokenizer.vocab_size, ids)))


@pytest.fixture(scope="module")
def with_specials(tmp_path_factory: pytest.TempPathFactory) -> Grammarian:
    """Markers of channels are special tokens, as those of gpt-oss."""
    names = ("start", "channel", "constrain", "message", "end")
    specials = [f"<|{name}|>" for name in names]
    return grammarian_of(tmp_path_factory.mktemp("harmony"), specials, ["<|return|>", "<|call|>"])


MARKED = re.compile(r"<[|｜][^\s<>]+>|<[^\s<>]+[|｜]>|\[/?[A-Z_]+\]")
"""Markers that are special tokens of the models that write them."""


@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_markers_that_are_special_tokens(spec: ParserSpec, tmp_path: Path) -> None:
    made_of: OutputFormat = spec.load()
    specials = sorted({each for marker in made_of.markers for each in MARKED.findall(marker)})
    if not specials:
        return
    grammarian = grammarian_of(tmp_path, specials, ["<|eos|>"])
    must = grammarian.compiled(structural_tag=must_call(made_of, TOOLS))
    for call in GOOD:
        assert grammarian.accepts(must, written(made_of, [call]))
    for call in BAD:
        assert not grammarian.accepts(must, written(made_of, [call]))
    tag = may_call(made_of, TOOLS)
    if tag is None:
        return
    may = grammarian.compiled(structural_tag=tag)
    assert grammarian.accepts(may, write_answer(made_of, content="Look"))
    assert grammarian.accepts(may, write_answer(made_of, content="Look", calls=GOOD[:1]))
    for call in BAD:
        assert not grammarian.accepts(may, write_answer(made_of, calls=[call]))


def test_answers_whose_prompt_has_the_mark_of_content(tmp_path: Path) -> None:
    """So Kimi K3's do without thoughts: they end that content before a call."""
    specials = sorted({each for marker in KIMI3.markers for each in MARKED.findall(marker)})
    grammarian = grammarian_of(tmp_path, specials, ["<|eos|>"])
    must = grammarian.compiled(structural_tag=must_call(KIMI3, TOOLS))
    may = grammarian.compiled(structural_tag=may_call(KIMI3, TOOLS))
    for grammar, content in ((must, ""), (may, ""), (may, "Look")):
        text = write_answer(KIMI3, content="Look", calls=GOOD[:1])
        answer = text.removeprefix(KIMI3.content_begin + "Look")
        assert grammarian.accepts(grammar, content + answer)
    assert grammarian.accepts(may, "Look" + KIMI3.content_end)
    assert not grammarian.accepts(must, "Look" + KIMI3.content_end)


@pytest.mark.parametrize("vocabulary", ["grammarian", "with_specials"])
def test_channels(vocabulary: str, request: pytest.FixtureRequest) -> None:
    grammarian: Grammarian = request.getfixturevalue(vocabulary)
    grammar = grammarian.compiled(structural_tag=must_call(HARMONY, TOOLS))
    assert grammarian.accepts(grammar, CALL)
    assert grammarian.accepts(grammar, THOUGHTS + CALL)
    assert not grammarian.accepts(grammar, THOUGHTS)
    assert not grammarian.accepts(grammar, CALL.replace("Oslo", 'Oslo", "x": "'))


def test_free_answers_of_channels_whose_calls_are_right(with_specials: Grammarian) -> None:
    """Models write the parts of a call's header in several orders."""
    grammar = with_specials.compiled(structural_tag=may_call(HARMONY, TOOLS))
    for channel in ("final", "commentary", "analysis"):
        said = f"<|channel|>{channel}<|message|>Hi,\nthere"
        assert with_specials.accepts(grammar, said)
        assert with_specials.accepts(grammar, THOUGHTS + said + "<|return|>")
        assert with_specials.accepts(grammar, said + "<|end|><|start|>assistant" + CALL)
    arguments = '<|message|>{"city": "Oslo", "days": 1}<|call|>'
    for header in (
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        "<|channel|>analysis to=functions.weather json",
        " to=functions.weather<|channel|>commentary",
    ):
        assert with_specials.accepts(grammar, THOUGHTS + header + arguments)
        other = header.replace("weather", "weathers")
        assert not with_specials.accepts(grammar, THOUGHTS + other + arguments)
        wrong = arguments.replace("1", '"x"')
        assert not with_specials.accepts(grammar, THOUGHTS + header + wrong)


def test_an_answer_that_goes_on_within_a_message_is_not_held_to_a_header() -> None:
    tools = [{"type": "function", "function": {"name": name, "strict": True}} for name in "ab"]
    chat = ChatOptions(tools=tools, allowed_tools=("b",))
    assert with_calls(SamplingParams(), HARMONY, chat).structured_outputs is not None
    assert told_tools(HARMONY, chat) == tools
    goes_on = replace(chat, continue_final_message=True)
    assert with_calls(SamplingParams(), HARMONY, goes_on).structured_outputs is None
    assert told_tools(HARMONY, goes_on) == tools[1:]
