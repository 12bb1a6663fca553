"""How long the client of a connection may take."""

from __future__ import annotations

from dataclasses import dataclass

SLOWEST = 240
"""Bytes of an answer that a client must take a second, once it is behind: one byte now and then
would hold a request for days."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a client gets: for the headers of a request that has begun, and for taking its
    part of an answer that waits, see `least_taken`."""

    header_s: float
    send_s: float


def least_taken(seconds: float) -> int:
    """The bytes that a client must take in so many seconds."""
    return max(1, int(seconds * SLOWEST))
