"""How much work a JSON body is for its decoder, counted in its bytes before it is decoded.

A body of 8 MB with one long text is decoded in 2 ms. The same size in tiny values takes 0.05 to
0.3 s in one call, during which no other thread of the process runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllmx_core.errors import InvalidRequestError

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


MAX_WEIGHT = 600_000
"""Decoded in about 20 ms at the most, of whatever it is made. Of token ids alone it is 600,000, and
the rules and messages of a call that a model can read stay far below it."""
MAX_ESCAPES = 3_000_000
"""Decoded in 12 ms, where they are those of short texts; of long ones there may be any number."""
_CONTAINER, _MEMBER = 3, 6
"""What a list or object, and a member of an object with its key, cost beside a plain value."""
_ESCAPES_OF_A_VALUE, _BYTES_OF_A_VALUE = 8, 32
"""They take as long; bytes of texts that are not all ASCII."""
_LIGHT = 100_000
"""Decoded in about 4 ms."""


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


def check_weight(body: bytes) -> bool:
    """Raises InvalidRequestError where decoding would take longer than `MAX_WEIGHT` allows. False:
    it may take milliseconds."""
    text = np.frombuffer(body, np.uint8)
    most = _count(text).weight  # what stands in texts counted with the rest
    if most > MAX_WEIGHT:
        _check(_count_outside_strings(body))
    rest = _num_escapes(text) // _ESCAPES_OF_A_VALUE
    if not body.isascii():
        rest += len(body) // _BYTES_OF_A_VALUE
    return most + rest <= _LIGHT


def check_escapes(body: bytes) -> None:
    """Raises InvalidRequestError where texts that are decoded with the rest have too many."""
    found = _num_escapes(np.frombuffer(body, np.uint8))
    if found > MAX_ESCAPES:
        raise InvalidRequestError(
            f"the short texts of the body have {found} backslashes, and at most {MAX_ESCAPES} are"
            " decoded: send characters as they are, in UTF-8, or split the call"
        )


def _check(found: JSONCounts) -> None:
    if found.weight > MAX_WEIGHT:
        raise InvalidRequestError(
            f"the body has {found.values} JSON values, of them {found.strings} strings,"
            f" {found.containers} lists and objects, and {found.members} members of objects, which"
            f" weigh {found.weight}, and at most {MAX_WEIGHT} is decoded (a string weighs 2, a list"
            f" or object {_CONTAINER + 1}, a member {_MEMBER + 2}, all else 1): send texts instead"
            " of token ids, or split the call"
        )


def _count_outside_strings(body: bytes) -> JSONCounts:
    counts = [_count(part.text[~part.inside]) for part in parts_of(body)]
    return JSONCounts(
        values=sum(each.values - 1 for each in counts) + 1,
        strings=sum(each.strings for each in counts),
        containers=sum(each.containers for each in counts),
        members=sum(each.members for each in counts),
    )


def _num_escapes(text: NDArray[np.uint8]) -> int:
    """Backslashes: of escaped ones twice as many."""
    return int(np.count_nonzero(text == ord("\\")))


def _count(text: NDArray[np.uint8]) -> JSONCounts:
    def number_of(character: str) -> int:
        return int(np.count_nonzero(text == ord(character)))

    return JSONCounts(
        values=number_of(",") + 1,
        strings=number_of('"'),
        containers=number_of("[") + number_of("{"),
        members=number_of(":"),
    )
