"""How long the client of a connection may take."""

from __future__ import annotations

from dataclasses import dataclass

SLOWEST = 240
"""Bytes per second that a slow client must at least take: one byte now and then would hold a
request for days."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a client gets: for the headers of a request that has begun, and for taking its
    part of an answer that waits, see `least_taken`."""

    header_s: float
    send_s: float


def least_taken(seconds: float) -> int:
    """The bytes that a client must take in this time."""
    return max(1, int(seconds * SLOWEST))
