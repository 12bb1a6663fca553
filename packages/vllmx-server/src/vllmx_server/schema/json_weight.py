"""How much work a JSON body is for its decoder, told from its bytes before it is decoded.

A body of 8 MB with one long text is decoded in 2 ms. One of as many bytes in tiny values takes 0.05
to 0.3 s, in one call during which no other thread of the process runs, the event loop neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllmx_core.errors import InvalidRequestError

MAX_WEIGHT = 600_000
"""Decoded in about 20 ms at the most, of whatever it is made. Of token ids alone it is 600,000, and
the rules and messages of a call that a model can read stay far below it."""
_CONTAINER, _MEMBER = 3, 6
"""What a list or object, and a member of an object with its key, cost beside a plain value."""


@dataclass(frozen=True, slots=True)
class JSONCounts:
    """What a body is made of."""

    values: int
    """Commas, and one: but for the first in each list and object, all of them."""
    strings: int
    containers: int
    members: int

    @property
    def weight(self) -> int:
        plain = self.values + self.strings
        return plain + _CONTAINER * self.containers + _MEMBER * self.members


def check_weight(body: bytes) -> None:
    """Raises InvalidRequestError where decoding would take longer than `MAX_WEIGHT` allows."""
    text = np.frombuffer(body, np.uint8)
    if _count(text).weight <= MAX_WEIGHT:  # what stands in texts counted with the rest
        return
    found = _count(text[~inside_strings(text)])
    if found.weight > MAX_WEIGHT:
        raise InvalidRequestError(
            f"the body has {found.values} JSON values, of them {found.strings} strings,"
            f" {found.containers} lists and objects, and {found.members} members of objects, which"
            f" weigh {found.weight}, and at most {MAX_WEIGHT} is decoded (a string weighs 2, a list"
            f" or object {_CONTAINER + 1}, a member {_MEMBER + 2}, all else 1): send texts instead"
            " of token ids, or split the call"
        )


def inside_strings(text: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which bytes of a JSON text belong to a string; its first quote does and its last does not."""
    quotes = text == ord('"')
    quotes[_escaped(text)] = False
    inside: NDArray[np.bool_] = np.bitwise_xor.accumulate(quotes)
    return inside


def _escaped(text: NDArray[np.uint8]) -> NDArray[np.intp]:
    """The positions of characters that follow an odd number of backslashes."""
    slashes = np.flatnonzero(text == ord("\\"))
    if not len(slashes):
        return slashes
    breaks = np.flatnonzero(np.diff(slashes) != 1)
    first, last = slashes[np.r_[0, breaks + 1]], slashes[np.r_[breaks, len(slashes) - 1]]
    behind: NDArray[np.intp] = last[(last - first) % 2 == 0] + 1
    found: NDArray[np.intp] = behind[behind < len(text)]
    return found


def _count(text: NDArray[np.uint8]) -> JSONCounts:
    def number_of(character: str) -> int:
        return int(np.count_nonzero(text == ord(character)))

    return JSONCounts(
        values=number_of(",") + 1,
        strings=number_of('"'),
        containers=number_of("[") + number_of("{"),
        members=number_of(":"),
    )
