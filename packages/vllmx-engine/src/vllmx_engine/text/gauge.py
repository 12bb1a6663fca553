"""This process's count of a limit that it shares with other processes."""

from __future__ import annotations

from typing import Protocol


class Gauge(Protocol):
    """A count of this process, and of all others that have the limit in common."""

    def set(self, value: int) -> None:
        """Sets this process's count. Any thread may call it."""
        ...

    @property
    def elsewhere(self) -> int:
        """The count of all other processes."""
        ...


class NamedGauge(Protocol):
    """Counts by name."""

    def add(self, name: str, count: int) -> None:
        """This process has more of this name, or fewer where `count` is negative."""
        ...

    def elsewhere(self, name: str) -> int:
        """Returns all other processes' count of a name, or slightly more."""
        ...


class Alone:
    """Gauge of a single-process server."""

    elsewhere = 0

    def set(self, value: int) -> None: ...


class AloneByName:
    """Named gauge of a single-process server."""

    def add(self, name: str, count: int) -> None: ...

    def elsewhere(self, name: str) -> int:
        return 0
