"""The format of a model's answers out of its chat template.

Conversations are rendered with names and values that occur nowhere else, and the texts around those
are the markers. A format is taken only if it predicts conversations that it was not made of, three
calls, none with arguments, nested values, quotes, Unicode, to the last character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from vllmx_core.output_format import (
    Calls,
    JsonArguments,
    JsonCall,
    NamedCall,
    TaggedArguments,
    Thinking,
)

from vllmx_engine.formats.renderings import (
    CONTENT,
    KEYS,
    NAMES,
    REASONING,
    VALUES,
    NotDerivedError,
    Renderings,
    call,
    common_prefix,
    open_tag,
    without_rest,
)
from vllmx_engine.formats.writer import WrittenCall, json_text, write_calls

_ONE = {KEYS[0]: VALUES[0]}
_BOTH = dict(zip(KEYS, VALUES, strict=True))


def _calls_of(renderings: Renderings) -> tuple[Calls, bool]:
    """Returns the format of calls that two of them show, and whether the template writes more than
    one. Raises NotDerivedError."""
    one, two = _without_ids(renderings.calls([call(0, _ONE)])), ""
    if NAMES[0] not in one:
        raise NotDerivedError("it writes no calls of tools")
    with suppress(NotDerivedError):  # it takes one call at a time
        two = _without_ids(renderings.calls([call(0, _ONE), call(1, _ONE)]))
    two = two if NAMES[1] in two else ""
    for is_compact, as_string in product((False, True), repeat=2):
        arguments = json_text(_ONE, is_compact)
        written = json.dumps(arguments) if as_string else arguments
        if written in one:
            return _with_json(one, two, written, is_compact, as_string), bool(two)
    return _with_tags(renderings, one, two), bool(two)


def _without_ids(text: str) -> str:
    for number in range(len(NAMES)):
        text = text.replace(f"zqid0000{number}", "{id}")
    return text


class _Frame:
    """The markers around one call and between two.

    Args:
        one, two: an answer with one call and one with two; two may be empty.
        first, last: the words that a call's own text begins and ends with, for each of the calls.
    """

    def __init__(self, one: str, two: str, first: tuple[str, str], last: tuple[str, str]) -> None:
        before, after = one[: _find(one, first[0])], one[_end(one, last[0]) :]
        self.section_begin, self.begin, self.separator = "", before, ""
        self.end, self.section_end = after, ""
        if not two:
            return
        between = two[_end(two, last[0]) : _find(two, first[1], _end(two, last[0]))]
        before, between = _with_index(before, between)
        self.begin = _common_end(before, between)
        self.section_begin = before.removesuffix(self.begin)
        between = between.removesuffix(self.begin)
        self.end = common_prefix(after, between)
        self.end = self.end.removesuffix(open_tag(self.end)) if self.end != after else after
        self.section_end = after.removeprefix(self.end)
        self.separator = between.removeprefix(self.end)
        self.section_begin = self.section_begin.replace("{index}", "0")


def _find(text: str, word: str, start: int = 0) -> int:
    at = text.find(word, start)
    if at < 0:
        raise NotDerivedError(f"{word} is in another place of the second call")
    return at


def _end(text: str, word: str) -> int:
    return _find(text, word) + len(word)


def _common_end(left: str, right: str) -> str:
    """The end that two texts share, without the rest of a tag that began before."""
    shared = common_prefix(left[::-1], right[::-1])[::-1]
    return shared if shared == left else without_rest(shared)


def _with_index(before: str, between: str) -> tuple[str, str]:
    """The same texts with {index} where the one has 0 and the other 1, if that makes more of them
    alike."""
    size = len(_common_end(before, between))
    if before[: len(before) - size].endswith("0") and between[: len(between) - size].endswith("1"):
        left, right = before[: len(before) - size - 1], between[: len(between) - size - 1]
        if _common_end(left, right):
            end = before[len(before) - size :]
            return f"{left}{{index}}{end}", f"{right}{{index}}{end}"
    return before, between


def _with_json(one: str, two: str, written: str, is_compact: bool, as_string: bool) -> Calls:
    """Arguments are one JSON object."""
    if one.find(NAMES[0]) > one.find(written):
        raise NotDerivedError("a call's name is behind its arguments")
    frame = _Frame(one, two, (NAMES[0], NAMES[1]), (written, written))
    middle = one[_end(one, NAMES[0]) : _find(one, written)]
    if two:
        start = _end(two, NAMES[1])
        middle, _ = _with_index(middle, two[start : _find(two, written, start)])
    found = _as_object(frame, middle, written, as_string)
    if found is not None:
        return _calls(frame, *found, is_compact)
    placeholders = [
        middle.rfind(word) + len(word) for word in ("{id}", "{index}") if word in middle
    ]
    cut = max(placeholders, default=0)
    made = NamedCall(JsonArguments(as_string), "{name}" + middle[:cut], middle[cut:])
    return _calls(frame, made, frame.begin, frame.end, is_compact)


def _calls(
    frame: _Frame, made: JsonCall | NamedCall, begin: str, end: str, is_compact: bool
) -> Calls:
    if not frame.section_begin and isinstance(made, JsonCall):
        frame.section_begin, begin = _split_list(frame, begin)
    is_bare = not (frame.section_begin + begin).strip()
    if is_bare and isinstance(made, NamedCall):
        raise NotDerivedError(
            "there is no marker before a call's name, so a call cannot be recognised"
        )
    return Calls(
        made,
        begin,
        end,
        frame.section_begin,
        frame.section_end,
        frame.separator,
        is_bare=is_bare,
        is_compact=is_compact,
    )


def _split_list(frame: _Frame, begin: str) -> tuple[str, str]:
    """A template that takes one call may write a list of one: the bracket is the section's."""
    if begin.rstrip().endswith("[") and frame.end.lstrip().startswith("]"):
        return begin, ""
    return frame.section_begin, begin


def _as_object(
    frame: _Frame, middle: str, written: str, as_string: bool
) -> tuple[JsonCall, str, str] | None:
    """The largest JSON object around name and arguments, what is left before and behind it."""
    for start in (i for i, char in enumerate(frame.begin) if char == "{"):
        if frame.begin[start:].startswith(("{id}", "{index}")):
            continue
        for stop in (i + 1 for i, char in enumerate(frame.end) if char == "}"):
            head, tail = frame.begin[start:], frame.end[:stop]
            try:
                value = json.loads(head + NAMES[0] + middle + written + tail)
            except ValueError:
                continue
            spelling = head + "{name}" + middle + "{arguments}" + tail
            made = _json_call(value, spelling)
            if made is not None and not as_string:
                return made, frame.begin[:start], frame.end[stop:]
    return None


def _json_call(value: Mapping[str, Any], spelling: str) -> JsonCall | None:
    wrapper = None
    for key, inner in value.items():
        if key == NAMES[0] and len(value) == 1:
            return JsonCall(name=None, spelling=spelling)
        if isinstance(inner, dict) and NAMES[0] in inner.values():
            wrapper, value = key, inner
            break
    keys = {str(text): key for key, text in value.items()}
    name = keys.get(NAMES[0])
    arguments = keys.get(str(_ONE))
    if name is None or arguments is None:
        return None
    call_id = next((key for text, key in keys.items() if text in ("{id}", "{index}")), None)
    return JsonCall(name, arguments, call_id, wrapper, spelling)


def _with_tags(renderings: Renderings, one: str, two: str) -> Calls:
    """Arguments stand between tags, strings as they are."""
    both = _without_ids(renderings.calls([call(0, _BOTH)]))
    words = [NAMES[0], KEYS[0], VALUES[0], KEYS[1], VALUES[1]]
    places = [both.find(word) for word in words]
    if -1 in places or places != sorted(places):
        raise NotDerivedError("arguments are neither JSON nor between tags")
    header, key_end, between, second_key_end = (
        both[places[i] + len(words[i]) : places[i + 1]] for i in range(4)
    )
    if key_end != second_key_end:
        raise NotDerivedError("the second argument is written in another way than the first")
    key_begin = without_rest(_common_end(header, between))
    value_end = between.removesuffix(key_begin)
    number_end = _key_end_of_number(renderings)
    tags = TaggedArguments(
        key_begin, number_end, value_end, key_end if key_end != number_end else None
    )
    if not key_begin.strip() or not key_end.strip() or not value_end.strip():
        raise NotDerivedError("arguments are not told apart by tags")
    if VALUES[0] + value_end not in one:
        raise NotDerivedError("the last argument ends in another way than the one before")
    frame = _Frame(one, two, (NAMES[0], NAMES[1]), (VALUES[0] + value_end, VALUES[0] + value_end))
    made = NamedCall(tags, "{name}", header.removesuffix(key_begin))
    return _calls(frame, made, frame.begin, frame.end, is_compact=False)


def _key_end_of_number(renderings: Renderings) -> str:
    text = renderings.calls([call(0, {KEYS[0]: 987654321})])
    at = text.find(KEYS[0])
    number = text.find("987654321")
    if not 0 <= at < number:
        raise NotDerivedError("numbers are written in another way")
    return text[at + len(KEYS[0]) : number]


_NESTED = {
    KEYS[0]: {"a": [1, -2.5, True, False, {"b": []}], "c d": "q\"uo'te\\ \n</b>"},
    KEYS[1]: 'Zürich 北京 🦊 <x y="z"> {"a": 1} & \\',
}
_CHECKS: tuple[Sequence[WrittenCall], ...] = (
    [call(0)],
    [call(1, _NESTED)],
    [call(2, {KEYS[1]: "x"})],
    [call(0, _NESTED), call(1), call(2, {KEYS[0]: 7})],
)
_MARKER = re.compile(r"(?:<[^<>\s]{1,60}>|\[[A-Za-z_]{1,40}\])[a-z]{0,20}\s*$")


def derive_calls(renderings: Renderings) -> Calls:
    """Derives the format of calls. Raises NotDerivedError."""
    calls, takes_several = _calls_of(renderings)
    for check in _CHECKS:
        if len(check) > 1 and not takes_several:
            continue
        actual = renderings.calls(check)
        predicted = write_calls(calls, check)
        if predicted != actual:
            raise NotDerivedError(_difference(predicted, actual))
    return replace(calls, ids=_ids(renderings), after_content=_after_content(renderings, calls))


def predicts(renderings: Renderings, calls: Calls) -> bool:
    """True if a recorded format writes a call of strings as the template does, and two if it takes
    two; white space around them is ignored. Raises NotDerivedError."""
    one = [call(0, {KEYS[0]: "x", KEYS[1]: "y z"})]
    if renderings.calls(one).strip() != write_calls(calls, one).strip():
        return False
    two = [*one, call(1, {KEYS[0]: "x"})]
    try:
        actual = renderings.calls(two)
    except NotDerivedError:
        return True
    return call(1).name not in actual or actual.strip() == write_calls(calls, two).strip()


def derive_thinking(renderings: Renderings) -> Thinking:
    """Derives the format of reasoning. Raises NotDerivedError."""
    text = renderings.thoughts(REASONING, CONTENT)
    at = text.rfind(REASONING)
    if at < 0:
        raise NotDerivedError("it leaves thoughts out")
    marker = _MARKER.search(text, 0, at)
    end = text[at + len(REASONING) : text.rfind(CONTENT)]
    if marker is None or not _MARKER.search(end.strip()):
        raise NotDerivedError("there is no marker around reasoning")
    thinking = Thinking(marker.group(), end)
    other = "Zqother <b> thought\n\nof 北京"
    predicted = thinking.begin + other + thinking.end + "Zqelse"
    if not renderings.thoughts(other, "Zqelse").endswith(predicted):
        raise NotDerivedError("other thoughts are written in another way")
    return thinking


def _after_content(renderings: Renderings, calls: Calls) -> str:
    """Returns the text between content and calls; "" if the template drops the content."""
    text = renderings.calls([call(0)], CONTENT)
    written = write_calls(calls, [call(0)])
    _, _, behind = text.rpartition(CONTENT) if CONTENT in text else ("", "", text)
    return behind.removesuffix(written) if behind.endswith(written) else ""


def _ids(renderings: Renderings) -> Literal["call", "short"]:
    """Returns "short" if the template takes short ids only: others are then written as short
    ones."""
    long, short = WrittenCall(call(0).name, {}, "call_0123456789abcdef01234567"), call(0)
    try:
        if long.id in renderings.calls([long]):
            return "call"
    except NotDerivedError:
        return "short"
    return "short" if short.id in renderings.calls([short]) else "call"


def _difference(predicted: str, actual: str) -> str:
    at = len(common_prefix(predicted, actual))
    near = slice(max(0, at - 20), at + 20)
    return f"a conversation is written as {actual[near]!r}, predicted was {predicted[near]!r}"
