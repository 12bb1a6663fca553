"""Which bytes of a JSON text belong to strings, a part of the text at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PART_BYTES = 64 << 10
"""What is made of it stays in the caches."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a JSON text."""

    begin: int
    """The place of its first byte in the text."""
    text: NDArray[np.uint8]
    inside: NDArray[np.bool_]
    """Which bytes belong to a string; its first quote does and its last does not."""


def parts_of(body: bytes, part_bytes: int = _PART_BYTES) -> Iterator[Part]:
    """The whole text in parts, in order."""
    in_string = in_escape = False
    for begin in range(0, len(body), part_bytes):
        text = np.frombuffer(body, np.uint8, min(part_bytes, len(body) - begin), begin)
        quotes = text == ord('"')
        escaped, in_escape = _escaped(text, in_escape)
        quotes[escaped] = False
        inside: NDArray[np.bool_] = np.bitwise_xor.accumulate(quotes) ^ in_string
        in_string = bool(inside[-1])
        yield Part(begin, text, inside)


def _escaped(text: NDArray[np.uint8], first: bool) -> tuple[NDArray[np.intp], bool]:
    """The positions of characters that follow an odd number of backslashes, and whether the one
    behind the text does; `first`: the text's first one does."""
    slashes = np.flatnonzero(text == ord("\\"))
    if first and len(slashes) and slashes[0] == 0:
        slashes = slashes[1:]
    found = np.zeros(int(first), np.intp)
    if not len(slashes):
        return found, False
    breaks = np.flatnonzero(np.diff(slashes) != 1)
    begins, ends = slashes[np.r_[0, breaks + 1]], slashes[np.r_[breaks, len(slashes) - 1]]
    behind = ends[(ends - begins) % 2 == 0] + 1
    is_open = len(behind) > 0 and int(behind[-1]) == len(text)
    return np.concatenate((found, behind[:-1] if is_open else behind)), is_open
