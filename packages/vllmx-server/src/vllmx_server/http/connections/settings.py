"""Settings of connections: headers of every answer, timeouts, the number of open files, and the
releases of the libraries whose protocols are subclassed here."""

from __future__ import annotations

import errno
import re
import ssl
import sys
from dataclasses import dataclass
from importlib.metadata import version

from hypercorn.config import Config
from vllmx_core.errors import ConfigError

if sys.platform != "win32":
    import resource

_TESTED = {"hypercorn": ((0, 18), (0, 19)), "h11": ((0, 14), (0, 17)), "h2": ((4, 3), (5, 0))}
"""Versions by distribution: the first release, and the first that was not tested."""
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

SAFE_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
"""Browsers do not guess types from bytes, nor send our addresses to other sites."""


class AnswerConfig(Config):
    """hypercorn's configuration, which its protocols ask for the headers of every answer."""

    hsts_max_age_s = 0
    _tls: ssl.SSLContext | None = None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """One context for all callers, so that a reloaded certificate is used by all."""
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
"""Bytes per second that a slow client must take: a byte now and then would hold a request for
days."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a client has for the headers of a request that has begun, and for taking
    `least_taken` bytes of an answer."""

    header_s: float
    send_s: float


def least_taken(seconds: float) -> int:
    """The bytes that a client must take in this time."""
    return max(1, int(seconds * SLOWEST))


_ENOUGH = 1 << 16
_MACOS_MOST = 10240
"""OPEN_MAX: macOS refuses a higher limit whatever it calls the hard one."""
_KEPT_BACK = 256
"""The descriptors for the engine core and its restart, files and logs: never more than half of all.
"""
_MOST_BY_DEFAULT = 1 << 14


def raise_descriptor_limit() -> int:
    """Raises the soft limit as far as that helps, and returns what holds now."""
    if sys.platform == "win32":
        return _ENOUGH
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ENOUGH
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    for wanted in (most, min(most, _MACOS_MOST)):
        if wanted <= soft:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue
        return wanted
    return soft


def connection_limit(wanted: int | None, descriptors: int) -> int:
    """The number of connections that may be open: `wanted`, or a number that suits so many
    descriptors. Raises ConfigError if they do not suffice for `wanted`."""
    most = descriptors - min(_KEPT_BACK, descriptors // 2)
    if wanted is None:
        return min(most, _MOST_BY_DEFAULT)
    if wanted > most:
        raise ConfigError(
            f"--max-connections {wanted} is more than the {most} that the limit of {descriptors}"
            f" open files allows: raise the limit (ulimit -Hn {wanted + _KEPT_BACK}, or"
            f" LimitNOFILE= of systemd), or lower --max-connections",
            param="max_connections",
        )
    return wanted


def check_versions() -> None:
    """Raises ConfigError for a release of hypercorn, h11 or h2 whose internals were not tested with
    the subclasses of this package: its guards might do nothing."""
    for name, (first, end) in _TESTED.items():
        installed = version(name)
        numbers = tuple(map(int, re.findall(r"\d+", installed)[:2]))
        if not first <= numbers < end:
            low, high = (".".join(map(str, bound)) for bound in (first, end))
            raise ConfigError(
                f"{name} {installed} is installed, and the server was tested with {low} up to, not"
                f" including, {high}: pip install '{name}>={low},<{high}'"
            )
