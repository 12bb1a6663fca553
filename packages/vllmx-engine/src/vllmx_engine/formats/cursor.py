"""A text that grows, and a place in it, for readers that are generators: they yield where they need
more text, and go on where they were when it has come.

So a reader is written as if the whole text were there, and how the text was cut into pieces cannot
change what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader under way: each yield asks for more text."""
_TRIM_CHARS = 4096
_MAX_SPACE = 256
"""White space beyond is no longer held back."""


class TextEndError(Exception):
    """The text ended before what was looked for."""


class Cursor:
    """A place in a text that grows.

    Attributes:
        text: what has come, less what was cut off behind the place.
        at: index of the place in it.
        held: what lies behind the place is still wanted.
    """

    __slots__ = ("_passing", "at", "ended", "held", "is_cut", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.held = False
        self.is_cut = False
        self._passing: tuple[Callable[[str], object], Callable[[str], None]] | None = None

    def add(self, text: str) -> None:
        """Text that follows."""
        self.text += text

    def end(self, is_cut: bool) -> None:
        """Nothing follows; `is_cut`: not because the model was done."""
        self.ended, self.is_cut = True, is_cut

    def more(self) -> Steps[None]:
        """Waits for more text. Raises TextEndError when there is none."""
        if self.ended:
            raise TextEndError
        yield

    def more_after(
        self, is_plain: Callable[[str], object], emit: Callable[[str], None]
    ) -> Steps[None]:
        """`more`, for which texts do not count that are plain and follow directly, where nothing is
        waiting to be read: they are given to `emit` as they are. Most texts of an answer are, and
        so cost no turn of all generators."""
        if not self.text:
            self._passing = (is_plain, emit)
        try:
            yield from self.more()
        finally:
            self._passing = None

    def passes(self, text: str) -> bool:
        """True if the next text was passed on; otherwise it must be added."""
        passing = self._passing
        if passing is None or not passing[0](text):
            return False
        passing[1](text)
        return True

    def trim(self) -> None:
        """Forgets what lies behind the place, unless somebody may go back to it."""
        if self.held:
            return
        if self.at == len(self.text):
            self.text, self.at = "", 0
        elif self.at > _TRIM_CHARS and self.at * 2 > len(self.text):
            self.text, self.at = self.text[self.at :], 0

    def space(self) -> Steps[None]:
        """Passes white space; afterwards there is a character."""
        while True:
            while self.at < len(self.text):
                if not self.text[self.at].isspace():
                    return
                self.at += 1
            yield from self.more()

    def peek(self) -> Steps[str]:
        """Returns the next character that is not white space, without passing it."""
        yield from self.space()
        return self.text[self.at]

    def take(self, marker: str) -> Steps[bool]:
        """Passes a marker up to its last character that is not white space, ignoring white space
        within and before it. False, with nothing passed, at another text."""
        marker = marker.rstrip()
        if self.text.startswith(marker, self.at):  # the usual case
            self.at += len(marker)
            return True
        start = self.at
        for char in marker:
            if char.isspace():
                continue
            if (yield from self.peek()) != char:
                self.at = start
                return False
            self.at += 1
        return True

    def until(self, words: tuple[str, ...], most: int) -> Steps[tuple[str, str] | None]:
        """The text up to the first of some words, and the word, which is not passed. None where
        there is none within `most` characters."""
        start = self.at
        pattern = re.compile("|".join(map(re.escape, words)))
        longest = max(map(len, words))
        searched = start
        while True:
            match = pattern.search(self.text, searched)
            if match is not None and match.start() - start <= most:
                self.at = match.start()
                return self.text[start : self.at], match.group()
            if match is not None or len(self.text) - start > most + longest:
                return None
            searched = max(start, len(self.text) - longest + 1)
            yield from self.more()


class Triggers:
    """Words to watch for in a text that is passed on as it comes.

    Args:
        words: of which the one that begins first is meant, of several the longest.
        with_space: white space before a word belongs to it.
    """

    __slots__ = ("_longest", "_pattern", "_prefixes", "_with_space", "is_plain", "words")

    def __init__(self, words: tuple[str, ...], *, with_space: bool = True) -> None:
        self.words = tuple(sorted({*words} - {""}, key=len, reverse=True))
        self._with_space = with_space
        self._longest = max(map(len, self.words), default=1)
        self._pattern = re.compile("|".join(map(re.escape, self.words)) or r"(?!)")
        starts = "".join(re.escape(word[0]) for word in self.words)
        plain = rf"[^{starts}]*[^{starts}\s]" if starts else r"[\s\S]*\S"
        self.is_plain: Callable[[str], object] = re.compile(plain).fullmatch
        """A test of a text: no word begins in it, nor could its end belong to one that follows."""
        self._prefixes = {word[:size] for word in self.words for size in range(1, len(word))}

    def find(self, cursor: Cursor) -> tuple[int, str] | None:
        """Finds the first word: the position where it begins with its white space, and the word.
        One that may turn out to be a longer word is not found yet."""
        match = self._pattern.search(cursor.text, cursor.at)
        if match is None:
            return None
        if cursor.text[match.start() :] in self._prefixes and not cursor.ended:
            return None
        return self._space_before(cursor, match.start()), match.group()

    def safe_end(self, cursor: Cursor) -> int:
        """The position up to which the text, which holds no word, cannot be part of one."""
        text, size = cursor.text, len(cursor.text)
        for start in range(max(cursor.at, size - self._longest + 1), size):
            if text[start:] in self._prefixes:
                return self._space_before(cursor, start)
        return self._space_before(cursor, size)

    def _space_before(self, cursor: Cursor, end: int) -> int:
        if not self._with_space:
            return end
        least = max(cursor.at, end - _MAX_SPACE)
        return least + len(cursor.text[least:end].rstrip())
