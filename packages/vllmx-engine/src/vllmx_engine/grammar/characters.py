"""Sets of characters as ranges of code points, and their notation and that of texts."""

from __future__ import annotations

import json
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint ranges of code points, ends included, without surrogates."""
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


def normal(ranges: Iterable[tuple[int, int]], *, is_excluded: bool = False) -> Ranges:
    """The characters in some ranges, or all others."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    if is_excluded:
        return without(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)), merged)
    return without(merged, [_SURROGATES])


def without(ranges: Iterable[tuple[int, int]], excluded: Iterable[tuple[int, int]]) -> Ranges:
    """The difference of two sets."""
    found = list(ranges)
    for low, high in excluded:
        found = [
            part
            for begin, end in found
            for part in ((begin, min(end, low - 1)), (max(begin, high + 1), end))
            if part[0] <= part[1]
        ]
    return tuple(found)


def shared(first: Ranges, other: Ranges) -> Ranges:
    """The intersection of two sets."""
    found: list[tuple[int, int]] = []
    mine = others = 0
    while mine < len(first) and others < len(other):
        low = max(first[mine][0], other[others][0])
        high = min(first[mine][1], other[others][1])
        if low <= high:
            found.append((low, high))
        if first[mine][1] < other[others][1]:
            mine += 1
        else:
            others += 1
    return tuple(found)


def regex_of(ranges: Ranges) -> str:
    """A regular expression of one character of the set."""
    spelled = (
        _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"
        for low, high in ranges
    )
    return f"[{''.join(spelled)}]"


def regex_of_text(text: str) -> str:
    """A regular expression of one text."""
    return "".join(_escaped(ord(char)) for char in text)


def lark_text(text: str) -> str:
    """A text in llguidance's Lark, whose quotes take only printable characters."""
    if text.isprintable():
        return json.dumps(text, ensure_ascii=False)
    return f"/{regex_of_text(text)}/"


def _escaped(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"
