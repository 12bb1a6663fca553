"""How many descriptors this process may have open, and how many of them connections may take."""

from __future__ import annotations

import sys

from vllmx_core.errors import ConfigError

if sys.platform != "win32":
    import resource

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
    """How many connections may be open: `wanted`, or what suits so many descriptors. Raises
    ConfigError when it is more than they allow."""
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
