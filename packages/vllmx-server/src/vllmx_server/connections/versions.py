"""Which releases of hypercorn and h11 the classes of this package were tested on."""

from __future__ import annotations

from importlib.metadata import version

from vllmx_core.errors import ConfigError

TESTED = {"hypercorn": ((0, 18), (0, 19)), "h11": ((0, 14), (0, 17)), "h2": ((4, 3), (5, 0))}
"""The versions by distribution: the first release, and the first that was not tested."""


def check_versions() -> None:
    """Raises ConfigError for a release whose internals may be others than those we build on."""
    for name, (first, end) in TESTED.items():
        installed = version(name)
        if not first <= _release(installed) < end:
            low, high = (".".join(map(str, bound)) for bound in (first, end))
            raise ConfigError(
                f"{name} {installed} is installed, and the server was tested with {low} up to, not"
                f" including, {high}: pip install '{name}>={low},<{high}'"
            )


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)
