"""The format of a model's answers out of its chat template.

Conversations are rendered with names and values that occur nowhere else, and the texts around those
are the markers. A format is taken only if it predicts conversations that it was not made of, three
calls, none with arguments, nested values, quotes, Unicode, to the last character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from vllmx_core.output_format import Calls, Thinking

from vllmx_engine.formats.anatomy import calls_of
from vllmx_engine.formats.renderings import (
    CONTENT,
    KEYS,
    REASONING,
    NotDerivedError,
    Renderings,
    call,
    common_prefix,
)
from vllmx_engine.formats.writer import WrittenCall, write_calls

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
    """How calls of tools are written. Raises NotDerivedError."""
    calls, takes_several = calls_of(renderings)
    for check in _CHECKS:
        if len(check) > 1 and not takes_several:
            continue
        actual = renderings.calls(check)
        predicted = write_calls(calls, check)
        if predicted != actual:
            raise NotDerivedError(_difference(predicted, actual))
    return replace(calls, ids=_ids(renderings), after_content=_after_content(renderings, calls))


def predicts(renderings: Renderings, calls: Calls) -> bool:
    """Whether a recorded format writes a call of strings as the template does, and two if it takes
    two; white space around them aside. Raises NotDerivedError."""
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
    """How thoughts are written. Raises NotDerivedError."""
    text = renderings.thoughts(REASONING, CONTENT)
    at = text.rfind(REASONING)
    if at < 0:
        raise NotDerivedError("it leaves thoughts out")
    marker = _MARKER.search(text, 0, at)
    end = text[at + len(REASONING) : text.rfind(CONTENT)]
    if marker is None or not _MARKER.search(end.strip()):
        raise NotDerivedError("no marker stands around thoughts")
    thinking = Thinking(marker.group(), end)
    other = "Zqother <b> thought\n\nof 北京"
    predicted = thinking.begin + other + thinking.end + "Zqelse"
    if not renderings.thoughts(other, "Zqelse").endswith(predicted):
        raise NotDerivedError("other thoughts are written in another way")
    return thinking


def _after_content(renderings: Renderings, calls: Calls) -> str:
    """What stands between a content and calls; "" where the template leaves the content out."""
    text = renderings.calls([call(0)], CONTENT)
    written = write_calls(calls, [call(0)])
    _, _, behind = text.rpartition(CONTENT) if CONTENT in text else ("", "", text)
    return behind.removesuffix(written) if behind.endswith(written) else ""


def _ids(renderings: Renderings) -> Literal["call", "short"]:
    """Whether only short ids are taken: others are written as short ones."""
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
