"""Escapes of JSON that are half of a character: decoders call them malformed, or cut off."""

from __future__ import annotations

import re

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_LAST_HALF = re.compile(rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_FIRST_HALVES = b"89abAB"


def lone_surrogate(body: bytes) -> int | None:
    """The place of the first escape of a surrogate that has no other half; None without one."""
    at = -1
    while (at := body.find(b"\\u", at + 1)) >= 0:
        if not _SURROGATE.match(body, at) or _is_escaped(body, at):
            continue
        is_first = body[at + 3] in _FIRST_HALVES
        if not (is_first and _LAST_HALF.match(body, at + 6)):
            return at
        at += 6
    return None


def _is_escaped(body: bytes, at: int) -> bool:
    """Whether an odd number of backslashes stands before."""
    begin = at
    while begin and body[begin - 1] == ord("\\"):
        begin -= 1
    return (at - begin) % 2 == 1
