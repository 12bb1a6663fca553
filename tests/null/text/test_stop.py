"""Stop strings: the same result however the text is cut, and never part of a stop string shown."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_engine.text.stop import StopMatcher, StopSet

FAST = settings(max_examples=300)
WORDS = st.text(alphabet="abc", min_size=1, max_size=5)


def run(
    pieces: list[str], stops: list[str], include: bool = False, uncounted: int = 0
) -> tuple[str, str | None]:
    """Shown text and stop string; the first `uncounted` pieces come before min_tokens."""
    matcher = StopMatcher(StopSet(stops), include)
    shown = ""
    for index, piece in enumerate(pieces):
        text, stop = matcher.push(piece, counts=index >= uncounted)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def expected(text: str, stops: list[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """The stop by definition: the one complete first (and past `after` characters), then the
    longest."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.text("abcd", max_size=40), st.lists(WORDS, min_size=1, max_size=4), st.data())
@FAST
def test_any_cut_gives_the_definition(text: str, stops: list[str], data: st.DataObject) -> None:
    include = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert run(pieces, stops, include) == expected(text, stops, include)


@given(st.text("abcd", max_size=40), st.lists(WORDS, min_size=1, max_size=4), st.data())
@FAST
def test_stops_before_min_tokens_are_text(text: str, stops: list[str], data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(text)))
    want = expected(text, stops, include=False, after=after)
    assert run(list(text), stops, uncounted=after) == want


@given(st.text("abcd", max_size=30), st.lists(WORDS, min_size=1, max_size=4))
@FAST
def test_held_text_is_the_longest_possible_beginning(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopSet(stops))
    seen = ""
    for char in text:
        seen += char
        if matcher.push(char)[1] is not None:
            return
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        assert matcher.held == max((b for b in beginnings if seen.endswith(b)), key=len)


def test_stop_over_many_pieces() -> None:
    assert run(["Hello ", "<", "/s", ">", "more"], ["</s>"]) == ("Hello ", "</s>")
    assert run(["Hello ", "<", "/s", ">", "more"], ["</s>"], include=True) == (
        "Hello </s>",
        "</s>",
    )


def test_false_start_is_released() -> None:
    matcher = StopMatcher(StopSet(["</s>"]))
    assert matcher.push("a<") == ("a", None)
    assert matcher.push("/") == ("", None)
    assert matcher.push("b<") == ("</b", None)
    assert matcher.flush() == "<"


def test_regex_characters_are_plain() -> None:
    for stop in ("]", "^x", "\\", "-", "a-z", "\n\n"):
        assert run([f"1{stop}2"], [stop]) == ("1", stop)
        assert run(["kept"], [stop]) == ("kept", None)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopSet(["a", ""])
