"""Which releases of hypercorn, h11 and h2 the classes of this package were tested on."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

TESTED = {"hypercorn": ((0, 18), (0, 19)), "h11": ((0, 14), (0, 17)), "h2": ((4, 3), (5, 0))}
"""The versions by distribution: the first release, and the first that was not tested."""


@cache
def untested() -> str | None:
    """What is installed whose internals may be others than those we build on, in one sentence with
    the remedy; None: nothing."""
    for name, (first, end) in TESTED.items():
        installed = version(name)
        if not first <= _release(installed) < end:
            low, high = (".".join(map(str, bound)) for bound in (first, end))
            return (
                f"{name} {installed} is installed, and the server was tested with {low} up to, not"
                f" including, {high}, so that limits of connections, times for headers, guards of"
                f" HTTP/2 and the short way of events are off: pip install '{name}>={low},<{high}'"
            )
    return None


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)
