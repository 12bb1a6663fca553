"""Proves that a format fits a model: it reads the answers that the chat template writes after its
generation prompt, as a whole and one character at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllmx_core.output_format import (
    JsonArguments,
    JsonCall,
    OutputFormat,
    TaggedArguments,
    ValueArguments,
)

from vllmx_engine.formats.answer_reader import AnswerReader, read_options
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.formats.renderings import (
    CONTENT,
    KEYS,
    REASONING,
    TOOLS,
    VALUES,
    Answer,
    NotDerivedError,
    Renderings,
    call,
    openai_calls,
)
from vllmx_engine.formats.tool_schemas import tools_by_name
from vllmx_engine.formats.writer import WrittenCall, write_calls

_TOOLS = tools_by_name(TOOLS)
_NESTED = {KEYS[0]: {"a": [1, -2.5, True, {"b": None}], "c": {"d": [], "e": "f g"}}}


_TOKEN = re.compile(r"<[^/<>\s][^<>\s]{0,60}>$")
_THOUGHT = {"reasoning_content": REASONING}


class NotProvenError(Exception):
    """Names the answer that a format does not read."""


def prove_answers(renderings: Renderings, made_of: OutputFormat) -> None:
    """Proves that answers without calls are read. Raises NotProvenError, NotDerivedError."""
    for mode in renderings.modes:
        for content in (CONTENT, *_marked_contents(made_of)):
            turn = {"content": content}
            for thought in ({}, _THOUGHT if made_of.thinking or made_of.channels else {}):
                answer = renderings.answer(turn | thought, mode)
                before, found, _ = answer.text.partition(content)
                if found and not _opens_thoughts(made_of, before):
                    _prove_answer(made_of, answer, content)


def prove_calls(renderings: Renderings, made_of: OutputFormat) -> None:
    """Proves that answers with calls are read, at least one. Raises NotProvenError,
    NotDerivedError."""
    proven = 0
    for mode in renderings.modes:
        for calls, content in _conversations(made_of):
            turn = {"content": content, "tool_calls": openai_calls(calls)}
            if content and (made_of.thinking or made_of.channels):
                turn |= _THOUGHT
            try:
                answer = renderings.answer(turn, mode)
            except NotDerivedError:
                continue
            written = [each for each in calls if each.name in answer.text]
            if not written or not _is_faithful(made_of, answer.text, written):
                continue
            if content and renderings.end(mode) in answer.text.partition(content)[2]:
                continue  # it makes two turns of them
            _prove_answer(made_of, answer, content if content in answer.text else "", written)
            proven += 1
    if not proven:
        raise NotProvenError("it writes no calls")


def _opens_thoughts(made_of: OutputFormat, text: str) -> bool:
    """True if a template took content for reasoning, because of a marker in it."""
    begin = "" if made_of.thinking is None else made_of.thinking.begin.strip()
    return bool(begin) and text.rstrip().endswith(begin)


def writes_calls(renderings: Renderings) -> bool:
    """True if the template writes calls at all. Raises NotDerivedError if it fails on one."""
    one = call(0, {KEYS[0]: VALUES[0]})
    turn = {"content": "", "tool_calls": openai_calls([one])}
    return one.name in renderings.answer(turn).text


def reads_itself(made_of: OutputFormat) -> bool:
    """True if calls are read as the format writes them."""
    if made_of.calls is None:
        return True
    calls = [call(0, {KEYS[0]: VALUES[0]}), call(1)]
    prompt = made_of.opened
    text = write_calls(made_of.calls, calls).removeprefix(made_of.opened)
    found = _read(made_of, prompt, text, 1)
    return [one.name for one in found.tool_calls] == [each.name for each in calls]


def _marked_contents(made_of: OutputFormat) -> Iterator[str]:
    """Contents that mention markers as prose."""
    words = [made_of.content_begin, made_of.content_end]
    if made_of.calls is not None:
        words += [made_of.calls.trigger, made_of.calls.end, made_of.calls.section_end]
    if made_of.thinking is not None and not made_of.opened:  # which may begin behind any content
        yield f"Zqone {made_of.thinking.begin.strip()} zqtwo"
        yield f"Zqone {made_of.thinking.end.strip()} zqtwo"
    marked = [word.strip() for word in dict.fromkeys(words) if len(word.strip()) > 1]
    if marked:
        yield f"Zqone {' or '.join(marked)} zqtwo"


def _conversations(made_of: OutputFormat) -> Iterator[tuple[Sequence[WrittenCall], str]]:
    """Calls, and what is said before them."""
    is_bare = made_of.calls is not None and made_of.calls.is_bare
    one = call(0, {KEYS[0]: VALUES[0]})
    yield [one], ""
    yield [one], "" if is_bare else CONTENT
    yield [one, call(1, {KEYS[0]: VALUES[0], KEYS[1]: "zq 1"})], ""
    yield [call(0)], ""
    yield [call(1, _NESTED)], ""
    yield [call(0, {KEYS[0]: "Zürich 北京 🦊 a<b & c>d", KEYS[1]: "{[(1, 2)]}: 'x'"})], ""
    for end in _ends(made_of):
        yield [call(0, {KEYS[0]: f'print("{end}")\nend'}), call(1, {KEYS[1]: f"a {end} b"})], ""


def _ends(made_of: OutputFormat) -> Iterator[str]:
    """Markers that end calls and values."""
    if made_of.calls is None:
        return
    calls, arguments = made_of.calls, _arguments(made_of)
    own = arguments.value_end if isinstance(arguments, TaggedArguments) else ""
    ends = (calls.end.strip(), calls.section_end.strip(), own.strip())
    yield from (end for end in dict.fromkeys(ends) if end)


def _prove_answer(
    made_of: OutputFormat, answer: Answer, content: str, calls: Sequence[WrittenCall] = ()
) -> None:
    prompt, text = answer.prompt, _without_token(made_of, answer.text)
    reasoning = REASONING if REASONING in text else ""
    in_thinking = read_options(made_of, _TOOLS, prompt).in_thinking
    if reasoning and answer.unopened.strip() and not in_thinking:
        return  # the prompt has closed thoughts, so that no answer to it would have any
    end = "" if made_of.thinking is None else made_of.thinking.end
    is_left_out = not reasoning and not text.lstrip().startswith(end.strip())
    if in_thinking and is_left_out and (answer.thinks or answer.unopened.strip()):
        # the template leaves thoughts out of the past: a model goes on like this
        reasoning, text = REASONING, REASONING + end + text
    for size in (len(text), 1):
        found = _read(made_of, prompt, text, size)
        _compare("thoughts", reasoning, found.reasoning.strip())
        _compare("content", content, found.content.strip())
        _compare("calls", [each.name for each in calls], [one.name for one in found.tool_calls])
        for each, one in zip(calls, found.tool_calls, strict=True):
            _prove_arguments(made_of, each.arguments, one.arguments)


def _without_token(made_of: OutputFormat, text: str) -> str:
    """The text without a final special token, unless that is a marker: readers never see such a
    token."""
    tag = _TOKEN.search(text.rstrip())
    return text if tag is None or tag.group() in "".join(made_of.markers) else text[: tag.start()]


def _read(made_of: OutputFormat, prompt: str, text: str, size: int) -> ReadAnswer:
    """The parts of an answer that comes in pieces of so many characters."""
    reader, found = AnswerReader(made_of, read_options(made_of, _TOOLS, prompt)), ReadAnswer()
    for at in range(0, len(text), max(1, size)):
        found.add(reader.push(text[at : at + size]))
    found.add(reader.finish())
    return found


def _compare(what: str, written: object, found: object) -> None:
    if written != found:
        raise NotProvenError(f"{what}: read {_short(found)}, written {_short(written)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


def _prove_arguments(made_of: OutputFormat, written: Mapping[str, Any], text: str) -> None:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise NotProvenError(f"arguments: read {_short(text)}, which is not JSON") from error
    _compare("arguments", list(written), list(found) if isinstance(found, dict) else found)
    for key, value in written.items():
        if found[key] != value and not _is_spelling(made_of, value, found[key]):
            _compare(f"values of {key}", value, found[key])


def _is_spelling(made_of: OutputFormat, value: Any, found: Any) -> bool:
    """True if a template may have written a value as this text. Some have no notation for values
    and print Python's form, with or without quotes."""
    arguments = _arguments(made_of)
    if not isinstance(found, str) or isinstance(arguments, JsonArguments):
        return isinstance(value, str) and isinstance(found, str) and value.strip() == found.strip()
    spellings = (value.strip(),) if isinstance(value, str) else (str(value), json.dumps(value))
    is_values = isinstance(arguments, ValueArguments)
    return any(each in found if is_values else each == found for each in spellings)


def _arguments(made_of: OutputFormat) -> JsonArguments | TaggedArguments | ValueArguments | None:
    call = None if made_of.calls is None else made_of.calls.call
    if call is None:
        return None
    return JsonArguments() if isinstance(call, JsonCall) else call.arguments


def _is_faithful(made_of: OutputFormat, text: str, calls: Sequence[WrittenCall]) -> bool:
    """True if the template spells arguments readably: some write Python without quotes, escapes or
    commas, which models do not."""
    syntax = _arguments(made_of)
    if not isinstance(syntax, ValueArguments):
        return True
    for each in calls:
        values = [value for value in each.arguments.values() if isinstance(value, str)]
        if not all(
            value.replace(" ", "").isalnum() or _is_quoted(syntax, value, text) for value in values
        ):
            return False
        for key in list(each.arguments)[1:]:
            before = text[text.find(each.name) :].partition(key)[0]
            if not before.rstrip().endswith(syntax.separator.strip()):
                return False
    return True


def _is_quoted(syntax: ValueArguments, value: str, text: str) -> bool:
    if not syntax.escapes:
        return f"{syntax.quote}{value}{syntax.quote}" in text
    quotes = [each for each in "'\"" if each not in value and "\n" not in value]
    spellings = [json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)]
    return any(each in text for each in (*spellings, *(f"{q}{value}{q}" for q in quotes)))
