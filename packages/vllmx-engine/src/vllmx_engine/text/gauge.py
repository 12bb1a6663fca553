"""What this process counts of a limit that it shares with others."""

from __future__ import annotations

from typing import Protocol


class Gauge(Protocol):
    """A count of this process, and of all others that have the limit in common."""

    def set(self, value: int) -> None:
        """What this process has now. Any thread may call it."""
        ...

    @property
    def elsewhere(self) -> int:
        """What all other processes have now."""
        ...


class NamedGauge(Protocol):
    """Counts by name."""

    def add(self, name: str, count: int) -> None:
        """This process has more of this name, or fewer where `count` is negative."""
        ...

    def elsewhere(self, name: str) -> int:
        """What all other processes have of it, or a little more."""
        ...


class Alone:
    """The gauge of a process beside which there is no other."""

    elsewhere = 0

    def set(self, value: int) -> None: ...


class AloneByName:
    """The named gauge of a process beside which there is no other."""

    def add(self, name: str, count: int) -> None: ...

    def elsewhere(self, name: str) -> int:
        return 0
