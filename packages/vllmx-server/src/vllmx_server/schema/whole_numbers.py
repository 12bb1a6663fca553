"""Whole numbers with a fraction of zeros: JSON has one kind of number, and 3.0 is 3."""

from __future__ import annotations

import re

import numpy as np

from vllmx_server.schema.json_weight import parts_of

_MISSED = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MARKS = np.zeros(256, np.bool_)
_MARKS[list(b".eE")] = True
_BEFORE = re.compile(rb"(?<![0-9.eE+-])-?[0-9]+$")
_FLOAT = re.compile(
    rb"-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?(?![0-9.eE])"
)
"""A number of JSON: malformed ones must stay malformed."""
_LONGEST = 48
"""The bytes of a number that may be whole; a longer one stays as it is."""
_LARGEST = float(1 << 64)


def misses_whole_number(message: str) -> bool:
    """Whether decoding failed with `message` because a float came where an integer must."""
    return _MISSED.search(message) is not None


def with_whole_numbers(body: bytes) -> bytes:
    """The JSON text with all whole floats outside of its strings as integers, which is the same
    data: 3.0, 1e3 and -0.0 are 3, 1000 and 0."""
    pieces: list[bytes] = []
    done = 0
    for part in parts_of(body):
        for place in np.flatnonzero(_MARKS[part.text] & ~part.inside).tolist():
            mark = part.begin + place
            if mark < done:  # the exponent of a number that was read
                continue
            before = _BEFORE.search(body, max(done, mark - _LONGEST), mark)
            found = None if before is None else _FLOAT.match(body, before.start())
            if found is None or found.end() <= mark:
                continue
            value = float(found[0])
            if value.is_integer() and abs(value) <= _LARGEST:
                pieces += (body[done : found.start()], b"%d" % int(value))
                done = found.end()
    return b"".join((*pieces, body[done:])) if pieces else body
