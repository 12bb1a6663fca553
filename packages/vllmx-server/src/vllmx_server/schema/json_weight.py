"""How much work a JSON body is for its decoder, told from its bytes before it is decoded.

A body of 8 MB with one long text is decoded in 2 ms. One of as many bytes in tiny values takes 0.05
to 0.3 s, in one call during which no other thread of the process runs, the event loop neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllmx_core.errors import InvalidRequestError

from vllmx_server.schema.json_strings import parts_of

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
