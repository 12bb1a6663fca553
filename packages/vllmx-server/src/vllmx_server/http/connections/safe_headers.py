"""Headers of every answer: of routes, of errors, and of what is refused on a connection."""

from __future__ import annotations

import ssl

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
