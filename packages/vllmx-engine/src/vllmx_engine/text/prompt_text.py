"""Keeps text that spells a special token as text.

A template writes one text, in which turn markers and user input look alike. So `Spellings.guarded`
puts `MARK` into the input of users and tools, before each place where a special token could begin.
The marks survive the template, which may cut, join and compare texts, and `Spellings.settled` then
reads from them which spellings are text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import accumulate, pairwise
from typing import Any

MARK = "\ufdd0"
"""A noncharacter code point, for use within programs."""
_MIN_CHARS = 2
"""A mark breaks a spelling after its first character."""


class PromptText(str):
    """A prompt in which some spellings of special tokens are text.

    Attributes:
        breaks: ascending places in the text that no special token spans.
    """

    breaks: tuple[int, ...]

    def __new__(cls, text: str, breaks: Iterable[int]) -> PromptText:
        """A text with these breaks."""
        made = super().__new__(cls, text)
        made.breaks = tuple(breaks)
        return made

    @property
    def marked(self) -> str:
        """The text with `MARK` at each break."""
        ends = (0, *self.breaks, len(self))
        return MARK.join(str(self[begin:end]) for begin, end in pairwise(ends))

    @classmethod
    def of_marked(cls, text: str) -> PromptText:
        """The inverse of `marked`."""
        pieces = text.split(MARK)
        return cls("".join(pieces), accumulate(map(len, pieces[:-1])))

    def part(self, begin: int, end: int) -> PromptText:
        """The text between two places, with its breaks."""
        return PromptText(self[begin:end], [at - begin for at in self.breaks if begin < at < end])


class Spellings:
    """Spellings of special tokens.

    Args:
        tokens: tokens of one character are ignored.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if len(token) >= _MIN_CHARS)
        self._firsts = "".join(sorted({token[0] for token in self.tokens}))
        self._begin = _beginnings(self.tokens)
        self._prefixes = {
            token[:size] for token in self.tokens for size in range(1, len(token))
        } - {""}
        self._longest = max(map(len, self.tokens), default=0)

    def guarded(self, value: Any) -> Any:
        """JSON data with `MARK` in each string where a special token begins, or could begin once
        other text follows."""
        if isinstance(value, str):
            return self._guarded_text(value)
        if isinstance(value, list):
            return [self.guarded(each) for each in value]
        if isinstance(value, dict):
            return {self._guarded_text(key): self.guarded(each) for key, each in value.items()}
        return value

    def _guarded_text(self, text: str) -> str:
        if not any(first in text for first in self._firsts):
            return text
        text = text.replace(MARK, "")
        found = self._begin.sub(MARK + r"\g<0>", text)
        at = self._cut_spelling(found)
        return found if at is None else found[:at] + MARK + found[at:]

    def _cut_spelling(self, text: str) -> int | None:
        """The place of a special token that the end of the text cuts off."""
        end = len(text.rstrip())
        for at in range(max(0, end - self._longest), end):
            if text[at] in self._firsts and text[at:end] in self._prefixes:
                return at
        return None

    def settled(self, text: str) -> str:
        """A rendered prompt without its marks: a `PromptText` if it has spellings that are text."""
        if MARK not in text:
            return text
        pieces = text.split(MARK)
        plain = "".join(pieces)
        places = dict.fromkeys(accumulate(map(len, pieces[:-1])))
        breaks = [at + 1 for at in places if self._begin.match(plain, at)]
        return PromptText(plain, breaks) if breaks else plain


def _beginnings(tokens: Collection[str]) -> re.Pattern[str]:
    """Finds the first character of each spelling, also of those that overlap."""
    firsts: dict[str, list[str]] = {}
    for token in tokens:
        firsts.setdefault(token[0], []).append(token[1:])
    branches = [f"{re.escape(first)}(?={_any_of(rests)})" for first, rests in firsts.items()]
    return re.compile("|".join(sorted(branches)) or r"(?!)", re.DOTALL)


def _any_of(texts: list[str]) -> str:
    """A pattern for any of these texts as a trie, which tries each character once."""
    if "" in texts:
        return ""
    firsts: dict[str, list[str]] = {}
    for text in texts:
        firsts.setdefault(text[0], []).append(text[1:])
    if len(firsts) == 1:
        ((first, rests),) = firsts.items()
        return re.escape(first) + _any_of(rests)
    branches = [re.escape(first) + _any_of(rests) for first, rests in firsts.items()]
    return f"(?:{'|'.join(branches)})"
