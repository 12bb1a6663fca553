"""Answers read while they come: the same events however the text is cut, and never an error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.output_format import OutputFormat
from vllmx_engine.formats.answer_reader import AnswerReader, ReadOptions
from vllmx_engine.formats.events import ReadAnswer
from vllmx_models.output_formats import HERMES, THINK

QWEN = OutputFormat("qwen", THINK.thinking, HERMES.calls)
TOOLS = {name: {"type": "object"} for name in ("f", "g")}


def answer(
    text: str, size: int = 0, *, is_cut: bool = False, options: ReadOptions | None = None
) -> tuple[str, str, list[tuple[str, str]]]:
    """(thoughts, content, calls) of a text that comes in pieces of `size`."""
    reader = AnswerReader(QWEN, options or ReadOptions(TOOLS), lambda: "id")
    found = ReadAnswer()
    size = size or max(1, len(text))
    for start in range(0, len(text), size):
        found.add(reader.push(text[start : start + size]))
    found.add(reader.finish(is_cut=is_cut))
    return found.reasoning, found.content, [(c.name, c.arguments) for c in found.tool_calls]


F = '<tool_call>\n{"name": "f", "arguments": {"a": "}<\\"/é"}}\n</tool_call>'
F_CALL = ("f", '{"a": "}<\\"/é"}')
SAMPLES = {
    "content": ("Hello\n world ", ("", "Hello\n world ", [])),
    "call": (F, ("", "", [F_CALL])),
    "two": (F + "\n" + F, ("", "", [F_CALL, F_CALL])),
    "before": ("Look: \n" + F, ("", "Look:", [F_CALL])),
    "after": (F + "\nDone. ", ("", "Done. ", [F_CALL])),
    "thoughts": ("<think>\nhm <tool_call>\n</think>\n\nYes", ("hm <tool_call>", "Yes", [])),
    "never a call in thoughts": (f"<think>{F}</think>{F}", (F, "", [F_CALL])),
    "thoughts not ended": ("<think>\nhm </thin", ("hm </thin", "", [])),
    "not thoughts": ("A <think> tag", ("", "A <think> tag", [])),
    "order": (
        '<tool_call>{"arguments":{"a":1},"name":"g"}</tool_call>',
        ("", "", [("g", '{"a":1}')]),
    ),
    "no arguments": ('<tool_call>{"name": "g"}</tool_call>', ("", "", [("g", "{}")])),
    "a string of arguments": (
        '<tool_call>{"name": "g", "arguments": "{\\"a\\": \\"\\ud83d\\ude00\\n\\"}"}</tool_call>',
        ("", "", [("g", '{"a": "😀\n"}')]),
    ),
    "null": ('<tool_call>{"name": "g", "arguments": null}</tool_call>', ("", "", [("g", "{}")])),
    "broken lines": (
        '<tool_call>{"name": "g", "arguments": {"a": "1\n2"}}</tool_call>',
        ("", "", [("g", '{"a": "1\\n2"}')]),
    ),
    "no end": ('<tool_call>{"name": "g", "arguments": {}}', ("", "", [("g", "{}")])),
    "looks like": ("a <tool_call> b <tool_call", ("", "a <tool_call> b <tool_call", [])),
    "no name": ('<tool_call>{"a": 1}</tool_call>', ("", '<tool_call>{"a": 1}</tool_call>', [])),
    "more behind": (
        '<tool_call>{"name": "g", "arguments": {"a": [1, {}]}, "x": {"y": 1}}</tool_call>',
        ("", "", [("g", '{"a": [1, {}]}')]),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_read_alike_however_it_is_cut(name: str) -> None:
    text, expected = SAMPLES[name]
    assert answer(text) == expected
    for size in range(1, len(text)):
        assert answer(text, size) == expected, size


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_is_lost_where_an_answer_is_cut(name: str) -> None:
    """Every letter and digit of each beginning of a sample stands somewhere, markers aside."""
    text, _ = SAMPLES[name]
    for end in range(len(text)):
        reasoning, content, calls = answer(text[:end], is_cut=True)
        if not calls:
            kept = "".join((reasoning + content).split())
            left_out = "".join(text[:end].split()).replace("<think>", "").replace("</think>", "")
            assert kept in (left_out, "".join(text[:end].split())), (end, kept)


def test_a_cut_call_has_the_beginning_of_its_arguments() -> None:
    whole = answer(F)[2][0][1]
    begun = 0
    for end in range(len(F)):
        for _, arguments in answer(F[:end], 1, is_cut=True)[2]:
            begun += 1
            assert whole.startswith(arguments)
    assert begun > 10


def test_prompts_may_leave_thoughts_open() -> None:
    options = ReadOptions(TOOLS, in_thinking=True)
    assert answer("hm\n</think>\n\nYes", options=options) == ("hm", "Yes", [])
    assert answer("hm", options=options) == ("hm", "", [])


def test_one_call_at_most_where_that_is_asked() -> None:
    options = ReadOptions(TOOLS, one_call=True)
    for size in (0, 1, 5):
        assert answer(F + "\n" + F, size, options=options) == ("", "", [F_CALL])


def test_without_tools_nothing_is_a_call() -> None:
    assert answer(F, options=ReadOptions()) == ("", F, [])


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{", "}",
     '"', "\\", "\\ud800", ",", ":", "\n", " ", "x", "é", '"name"', '"f"', "null", "[", "]"]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=14), st.integers(1, 5), st.booleans())
def test_readers_never_raise_and_cuts_change_nothing(
    parts: list[str], size: int, is_cut: bool
) -> None:
    text = "".join(parts)
    assert answer(text, size, is_cut=is_cut) == answer(text, is_cut=is_cut)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    st.integers(1, 7),
)
def test_arguments_keep_their_spelling(value: object, size: int) -> None:
    for ascii_only in (True, False):
        arguments = json.dumps({"a": value}, ensure_ascii=ascii_only)
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert answer(text, size)[2] == [("f", arguments)]
