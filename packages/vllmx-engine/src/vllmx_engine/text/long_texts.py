"""Long texts are measured a piece at a time, before they are tokenised whole.

What the library makes of millions of tokens is freed and listed while no other thread of the
process runs, 20 ms for each million. So a text that has far more tokens than are wanted is refused,
or cut, by what its pieces have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

PIECE_CHARS = 1 << 18
"""A piece of text has a million tokens at the most, and takes 0.1 s."""
_SEAM_TOKENS = 4096
"""A piece may have so many tokens fewer within its text than alone: a few are usual."""

Count = Callable[[str], int]
"""The tokens of a text."""


def fewest_tokens(texts: Sequence[str], enough: int, count: Count) -> int:
    """A number of tokens that the texts have at least. Nothing is counted behind the piece with
    which there are more than `enough`."""
    found = 0
    for text in texts:
        for _, piece in _pieces(text, from_end=False):
            found += _sure(piece, count)
            if found > enough:
                return found
    return found


def part_with(text: str, num_tokens: int, count: Count, *, from_end: bool) -> str:
    """The beginning of a text, or its end, that has more than so many tokens; the whole text where
    it has no more."""
    found = 0
    for size, piece in _pieces(text, from_end=from_end):
        found += _sure(piece, count)
        if found > num_tokens:
            return text[-size:] if from_end else text[:size]
    return text


def _sure(piece: str, count: Count) -> int:
    return max(0, count(piece) - _SEAM_TOKENS)


def _pieces(text: str, *, from_end: bool) -> Iterator[tuple[int, str]]:
    """The pieces in the order in which they are looked at, each with the number of characters up to
    its far end."""
    for begin in range(0, len(text), PIECE_CHARS):
        size = min(begin + PIECE_CHARS, len(text))
        first = len(text) - size if from_end else begin
        yield size, text[first : first + size - begin]
