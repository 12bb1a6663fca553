"""Every recorded format reads what it writes, however that is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.output_format import Calls, NamedCall, OutputFormat, TaggedArguments
from vllmx_core.plugins.specs import ParserSpec
from vllmx_engine.formats.answer_reader import AnswerReader, ReadOptions
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.formats.writer import WrittenCall
from vllmx_models.parsers import PARSERS

from tests.written_answers import write_answer

STRING = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": STRING, "when": STRING}},
    "add-2": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["number", "null"]},
            "more": {"type": "object"},
            "each": {"type": "array"},
            "sure": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
CALLS = [
    WrittenCall("get_weather", {"city": 'Göteborg "x"\n<b>', "when": "12"}, "abcdef001"),
    WrittenCall("now", {}, "abcdef002"),
    WrittenCall(
        "add-2",
        {"a": -3, "b": 1.5, "more": {"k": [1, None, {"é": "'v'"}]}, "each": [], "sure": True},
        "abcdef003",
    ),
]
FORMATS = [spec for spec in PARSERS if spec.load().channels is None]


def read(made_of: OutputFormat, text: str, size: int = 0) -> ReadAnswer:
    reader, found = AnswerReader(made_of, ReadOptions(TOOLS), lambda: "id"), ReadAnswer()
    size = size or max(1, len(text))
    for start in range(0, len(text), size):
        found.add(reader.push(text[start : start + size]))
    found.add(reader.finish())
    return found


def parts(found: ReadAnswer) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
    return found.reasoning, found.content, calls


def expected(calls: Calls | None) -> list[WrittenCall]:
    return [] if calls is None else CALLS


@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_a_format_reads_what_it_writes(spec: ParserSpec) -> None:
    made_of: OutputFormat = spec.load()
    assert made_of.name == spec.name
    calls = expected(made_of.calls)
    bare = made_of.calls is not None and made_of.calls.is_bare
    reasoning = "Let me see.\nOr not" if made_of.thinking else ""
    content = "" if bare else "Here: it is"
    text = write_answer(made_of, reasoning=reasoning, content=content, calls=calls)
    whole = read(made_of, text)
    assert parts(whole) == (reasoning, content, [(c.name, dict(c.arguments)) for c in calls])
    spelt = [call.arguments for call in whole.tool_calls]
    for size in (*range(1, 24), 50):
        again = read(made_of, text, size)
        assert [call.arguments for call in again.tool_calls] == spelt
        assert (again.reasoning, again.content) == (reasoning, content)


@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_what_has_come_is_never_taken_back(spec: ParserSpec) -> None:
    """Cut anywhere, a call that has begun has the beginning of its arguments; what follows of the
    text is no content."""
    made_of: OutputFormat = spec.load()
    if made_of.calls is None:
        return
    text = write_answer(made_of, calls=CALLS[:1])
    whole = read(made_of, text).tool_calls[0].arguments
    for end in range(len(text)):
        reader, found = AnswerReader(made_of, ReadOptions(TOOLS), lambda: "id"), ReadAnswer()
        for char in text[:end]:
            found.add(reader.push(char))
        for call in found.tool_calls:
            assert call.name == "get_weather"
            assert whole.startswith(call.arguments)
        found.add(reader.finish(is_cut=True))
        assert found.content == "" or not found.tool_calls


def test_tagged_strings_stream_as_they_come() -> None:
    for spec in FORMATS:
        calls = spec.load().calls
        if calls is None or not isinstance(calls.call, NamedCall):
            continue
        if not isinstance(calls.call.arguments, TaggedArguments):
            continue
        text = write_answer(spec.load(), calls=[WrittenCall("get_weather", {"city": "a" * 40})])
        reader, found = AnswerReader(spec.load(), ReadOptions(TOOLS)), ReadAnswer()
        found.add(reader.push(text[: text.index("aaaa") + 20]))
        assert found.tool_calls[0].arguments == '{"city": "' + "a" * 20


def test_tagged_strings_hold_the_markers_of_their_ends() -> None:
    """A marker that neither another argument nor the end of the call follows is part of it."""
    for spec in FORMATS:
        made_of = spec.load()
        calls = made_of.calls
        if calls is None or not isinstance(calls.call, NamedCall):
            continue
        if not isinstance(tags := calls.call.arguments, TaggedArguments):
            continue
        end = tags.value_end.strip()
        city = f'print("{end}")  # {end} and {end}\n{end * 2}x'
        arguments = {"city": city, "when": f"{end}."}
        text = write_answer(made_of, calls=[WrittenCall("get_weather", arguments, "a"), CALLS[1]])
        for size in (0, 1, 2, 3, 7):
            assert parts(read(made_of, text, size))[2] == [("get_weather", arguments), ("now", {})]


HARMONY_TEXT = (
    "<|channel|>analysis<|message|>Let me see<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
    ' <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (HARMONY_TEXT, ("Let me see", "I look.", [("get_weather", {"city": "Oslo"})])),
        (
            " to=functions.now<|channel|>commentary json<|message|>{}",
            ("", "", [("now", {})]),
        ),
        ("<|channel|>final<|message|>Hi <b><|return|>", ("", "Hi <b>", [])),
        ("<|channel|>final<|message|>Hi", ("", "Hi", [])),
        ("<|channel|>fin", ("", "", [])),
        ("Just text", ("", "Just text", [])),
    ],
)
def test_channels(text: str, result: tuple[str, str, list[tuple[str, Any]]]) -> None:
    spec = next(spec for spec in PARSERS if spec.name == "harmony")
    for size in range(len(text)):
        assert parts(read(spec.load(), text, size)) == result


@pytest.mark.parametrize(
    ("text", "is_unread"),
    [
        (HARMONY_TEXT, False),
        ("<|channel|>commentary to=python <|message|>1 + 1<|call|>", True),
        ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", True),
        (" to=functions. <|channel|>commentary<|message|>{}", True),
        ("<|channel|>commentary to=functions.now<|call|>", True),
        ("<|channel|>commentary to=functions.now " + "x" * 600, True),
        ("<|channel|>final<|message|>Go to=functions.now<|return|>", False),
        ("Just text to=functions.now", False),
        ("Just text to=functions.now " + "x" * 600, False),
    ],
)
def test_messages_to_tools_that_are_no_calls(text: str, is_unread: bool) -> None:
    made_of = next(spec for spec in PARSERS if spec.name == "harmony").load()
    for size in (1, 7, len(text)):
        reader = AnswerReader(made_of, ReadOptions(TOOLS))
        for start in range(0, len(text), size):
            reader.push(text[start : start + size])
        reader.finish()
        assert reader.has_unread_calls == is_unread
        assert not (is_unread and reader.num_calls)
    plain = AnswerReader(made_of, ReadOptions())
    plain.push(text)
    plain.finish()
    assert not plain.has_unread_calls, "without tools nothing is a call"


def test_an_answer_that_was_cut_has_no_call_that_could_not_be_read() -> None:
    made_of = next(spec for spec in PARSERS if spec.name == "harmony").load()
    reader = AnswerReader(made_of, ReadOptions(TOOLS))
    reader.push("<|channel|>commentary to=functions.now")
    reader.finish(is_cut=True)
    assert not reader.has_unread_calls


def test_names_are_given_once() -> None:
    names = [name for spec in PARSERS for name in (spec.name, *spec.aliases)]
    assert len(names) == len(set(names))


ODD = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    "\\u12",
    ",",
    ":",
    "=",
    "(",
    ")",
    "\n",
    " ",
    "x",
    "é",
    "5",
]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_readers_never_raise_and_cuts_change_nothing(data: st.DataObject) -> None:
    """Texts are made of a format's markers and of what stands in values."""
    made_of: OutputFormat = data.draw(st.sampled_from(PARSERS)).load()
    words = [*made_of.markers, *(word for marker in made_of.markers for word in marker.split())]
    words += [
        "get_weather",
        '{"name": "now", "arguments": ',
        "city",
        "to=functions.now",
        "analysis",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*words, *ODD]), max_size=12)))
    is_cut, opened = data.draw(st.booleans()), data.draw(st.booleans())
    found = [
        events(made_of, text, size, is_cut=is_cut, opened=opened)
        for size in (0, data.draw(st.integers(1, 6)))
    ]
    assert found[0] == found[1]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_cuts_change_nothing_of_damaged_answers(data: st.DataObject) -> None:
    """Answers from which a part is left out, and into which something else was put."""
    made_of: OutputFormat = data.draw(st.sampled_from(FORMATS)).load()
    text = write_answer(made_of, reasoning="so", content="Hi\n", calls=expected(made_of.calls))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 8)) | st.just(len(text)))
    text = text[:start] + data.draw(st.sampled_from(["", *ODD])) + text[end:]
    is_cut, size = data.draw(st.booleans()), data.draw(st.integers(1, 9))
    assert events(made_of, text, size, is_cut=is_cut) == events(made_of, text, 0, is_cut=is_cut)


def events(
    made_of: OutputFormat, text: str, size: int, *, is_cut: bool, opened: bool = False
) -> Any:
    """What was read, with the arguments as they are."""
    options = ReadOptions(TOOLS, opened=opened)
    reader, found = AnswerReader(made_of, options, lambda: "id"), ReadAnswer()
    for start in range(0, len(text), size or max(1, len(text))):
        found.add(reader.push(text[start : start + (size or len(text))]))
    found.add(reader.finish(is_cut=is_cut))
    return found.reasoning, found.content, found.tool_calls
