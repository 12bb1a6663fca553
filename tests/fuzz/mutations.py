"""Strategies for damaged copies of valid inputs: bytes that were overwritten, JSON that is still
JSON but says something else, and JSON that is written as nobody writes it."""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

DEEP_TEXTS = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900])
"""Nested more deeply than parsers go."""
_DEEP: list[Any] = []
for _ in range(150):  # more would be too deep for this module itself
    _DEEP = [_DEEP]
PATCHES = st.one_of(
    st.integers(0, 255).map(lambda value: bytes([value])),
    st.sampled_from([0, 1, 2, 8, 12, 33, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]).map(
        lambda value: struct.pack("<I", value)
    ),
    st.sampled_from([0, 1, 31, 1 << 16, 1 << 33, 1 << 62, 1 << 63, (1 << 64) - 1]).map(
        lambda value: struct.pack("<Q", value)
    ),
    st.binary(min_size=1, max_size=12),
)
VALUES = st.one_of(
    st.sampled_from(
        [
            None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 255, 1024, 65536, 1 << 24, (1 << 31) - 1,
            1 << 31, (1 << 32) - 1, 1 << 53, 1 << 63, (1 << 64) - 1, 10**30, 10**400, 0.0, 0.5,
            -0.0, 1e-30, 1e300, float("inf"), float("-inf"), float("nan"), "", "a", "\0", "\ud800",
            "\u2581", "<0x00>", "x" * 5000, [], {}, [[]], [None], {"": None}, [0] * 300, _DEEP,
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.integers(-3, 9) | st.text(max_size=3), max_size=4),
)  # fmt: skip
_CHILDREN = 12
"""So many entries of a container are changed; the rest of a vocabulary is the same again."""


@st.composite
def patched(draw: st.DrawFn, seed: bytes, header_bytes: int) -> bytes:
    """A copy with up to three places overwritten, and perhaps cut short."""
    data = bytearray(seed)
    places = st.tuples(st.integers(0, header_bytes), PATCHES)
    for at, patch in draw(st.lists(places, min_size=1, max_size=3)):
        data[at : at + len(patch)] = patch
    return bytes(data[: draw(st.none() | st.integers(0, len(seed)))])


@st.composite
def changed_json(draw: st.DrawFn, seeds: Sequence[Any], keys: Sequence[str]) -> Any:
    """One of `seeds` with up to four changes. `keys` are names worth adding to an object."""
    value = copy.deepcopy(draw(st.sampled_from(seeds)))
    values = VALUES | st.sampled_from(seeds).flatmap(lambda seed: st.sampled_from(_inside(seed)))
    for _ in range(draw(st.integers(1, 4))):
        holders = [part for part in _inside(value) if isinstance(part, dict | list)]
        if not holders:
            return value
        _change(draw, draw(st.sampled_from(holders)), values, keys)
    return value


def _change(
    draw: st.DrawFn, holder: Any, values: st.SearchStrategy[Any], keys: Sequence[str]
) -> None:
    """One change to an object or an array."""
    places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    if action == "add" or not places:
        new = copy.deepcopy(draw(values))
        if isinstance(holder, dict):
            holder[draw(st.sampled_from(keys) | st.text(max_size=5))] = new
        else:
            holder.insert(draw(st.integers(0, len(holder))), new)
        return
    place = draw(st.sampled_from(places[:_CHILDREN] + places[-1:]))
    if action == "remove":
        del holder[place]
    else:
        holder[place] = copy.deepcopy(draw(values))


ODD_NUMBERS = (
    b"9" * 5000, b"-" + b"9" * 400, b"1e999999", b"1e-999999", b"0." + b"0" * 3000 + b"1", b"-0",
    b"-0.0", b"1E+2", b"NaN", b"-Infinity", b"007", b"0x10", b"18446744073709551616", b"1" * 4301,
)  # fmt: skip
ODD_STRINGS = (
    b'"\\ud800"',
    b'"\\udc00\\ud800x"',
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b'"\\u0000"',
    b'"\\ud83d\\ude42"',
    b'"\n"',
    b'"\\q"',
    b'"' + b"\\u00e9" * 2000 + b'"',
)
ODD_VALUES = (b"[" * 600 + b"]" * 600, b'{"a":' * 600 + b"1" + b"}" * 600, b"", b"[1,]", b"{,}")
_NUMBER = re.compile(rb"(?<=[:\[,\s])-?\d+(?:\.\d+)?(?:e-?\d+)?(?=[,\s\]}])")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_MEMBER = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:')


@st.composite
def odd_json(draw: st.DrawFn, texts: Sequence[bytes]) -> bytes:
    """One of some JSON texts with up to three oddities that no decoded value can show: numbers of
    thousands of digits, halves of characters, names that are there twice, nesting in the middle,
    a byte order mark, a rest behind the end."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 3))):
        what = draw(st.sampled_from(("number", "string", "twice", "value", "ends")))
        pattern = {"number": _NUMBER, "string": _STRING, "value": _STRING}.get(what, _MEMBER)
        found = list(pattern.finditer(text))
        if what == "ends" or not found:
            text = draw(st.sampled_from((b"\xef\xbb\xbf%b", b"%b x", b"%b{}", b"\x00%b"))) % text
            continue
        first, last = draw(st.sampled_from(found)).span()
        if what == "twice":
            text = text[:first] + text[first:last] + b"1," + text[first:]
            continue
        odd = {"number": ODD_NUMBERS, "string": ODD_STRINGS, "value": ODD_VALUES}[what]
        text = text[:first] + draw(st.sampled_from(odd)) + text[last:]
    return text


def _inside(value: Any) -> list[Any]:
    """The value and what it holds, at any depth; the first entries of each container."""
    found, waiting = [], [value]
    while waiting and len(found) < 2000:
        part = waiting.pop()
        found.append(part)
        if not isinstance(part, dict | list):
            continue
        waiting += list(part.values() if isinstance(part, dict) else part)[:_CHILDREN]
    return found


def as_json(value: Any) -> bytes:
    """UTF-8 with lone surrogates escaped, NaN and infinities as Python writes them."""
    return json.dumps(value).encode()
