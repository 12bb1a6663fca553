"""Headers of every answer, and the timeouts of a connection."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from hypercorn.config import Config

SAFE_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
"""No type is guessed from an answer's bytes, and no address of ours is told to other sites."""


class AnswerConfig(Config):
    """hypercorn's configuration, which its protocols ask for what stands in every answer."""

    hsts_max_age_s = 0
    _tls: ssl.SSLContext | None = None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """One for all who ask: a certificate that is read again counts for each of them."""
        if self._tls is None:
            self._tls = super().create_ssl_context()
        return self._tls

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        """hypercorn's own, and ours."""
        found = [*super().response_headers(protocol), *SAFE_HEADERS]
        if self.hsts_max_age_s:
            value = b"max-age=%d" % self.hsts_max_age_s
            found.append((b"strict-transport-security", value))
        return found


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
