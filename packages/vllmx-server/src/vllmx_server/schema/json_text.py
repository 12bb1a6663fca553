"""Work on JSON texts before they are decoded: bounds on their values, whole floats as integers."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray
from vllmx_core.errors import InvalidRequestError

MAX_WEIGHT = 600_000
"""Decoded in one call, which no other thread interrupts, in at most about 20 ms. 600,000 token ids
have this weight; the rules and messages of a call that a model can read have far less."""
_CONTAINER, _MEMBER = 3, 6
"""The weight of a list or object, and of a member of an object, on top of a plain value's 1."""
_MISSED = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MARKS = np.zeros(256, np.bool_)
_MARKS[list(b".eE")] = True
_BEFORE = re.compile(rb"(?<![0-9.eE+-])-?[0-9]+$")
_FLOAT = re.compile(
    rb"-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?(?![0-9.eE])"
)
"""A number of JSON: malformed ones must stay malformed."""
_LONGEST = 48
"""Longer numbers (in bytes) stay as they are."""
_LARGEST = float(1 << 64)


def check_weight(body: bytes) -> None:
    """Raises InvalidRequestError for more values than `MAX_WEIGHT` allows: 8 MB of tiny ones would
    hold the interpreter lock for 0.05 to 0.3 s."""
    text = np.frombuffer(body, np.uint8)
    if _weight(*_counts(text)) <= MAX_WEIGHT:  # which counts the contents of strings, too
        return
    values, strings, containers, members = _counts(text[outside_strings(body)])
    weight = _weight(values, strings, containers, members)
    if weight > MAX_WEIGHT:
        raise InvalidRequestError(
            f"the body has {values} JSON values, of them {strings} strings,"
            f" {containers} lists and objects, and {members} members of objects, which"
            f" weigh {weight}, and at most {MAX_WEIGHT} is decoded (a string weighs 2, a list"
            f" or object {_CONTAINER + 1}, a member {_MEMBER + 2}, all else 1): send texts instead"
            " of token ids, or split the call"
        )


def outside_strings(body: bytes) -> NDArray[np.bool_]:
    """True for each byte outside of strings; a string's last quote counts as outside."""
    plain = body.replace(b"\\\\", b"xx").replace(b'\\"', b"xx")
    quotes = np.frombuffer(plain, np.uint8) == ord('"')
    return ~np.bitwise_xor.accumulate(quotes)


def _counts(text: NDArray[np.uint8]) -> tuple[int, int, int, int]:
    """(values, strings, containers, members): values are commas and one, so the first one in each
    container is not counted."""
    commas, quotes, lists, objects, colons = (
        int(np.count_nonzero(text == character)) for character in b',"[{:'
    )
    return commas + 1, quotes, lists + objects, colons


def _weight(values: int, strings: int, containers: int, members: int) -> int:
    return values + strings + _CONTAINER * containers + _MEMBER * members


def misses_whole_number(message: str) -> bool:
    """True if decoding failed with `message` because a float came where an integer must."""
    return _MISSED.search(message) is not None


def with_whole_numbers(body: bytes) -> bytes:
    """The same JSON with all whole floats outside of strings as integers: 3.0, 1e3 and -0.0 are 3,
    1000 and 0, since JSON has one kind of number."""
    pieces: list[bytes] = []
    done = 0
    marks = _MARKS[np.frombuffer(body, np.uint8)] & outside_strings(body)
    for mark in np.flatnonzero(marks).tolist():
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
