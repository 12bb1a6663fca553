"""Strategies for damaged copies of valid inputs: bytes that were overwritten, JSON that is still
JSON but says something else."""

from __future__ import annotations

import copy
import json
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
