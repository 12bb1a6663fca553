"""How long the client of a connection may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a client gets: for the headers of a request that has begun, and for taking
    something of an answer."""

    header_s: float
    send_s: float
