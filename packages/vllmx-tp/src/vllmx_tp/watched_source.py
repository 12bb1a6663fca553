"""The weights of rank 0, which stops reading where another rank cannot load its part."""

from __future__ import annotations

from collections.abc import Callable, Collection

from vllmx_core.weights import WeightPart, WeightSource


class WatchedSource:
    """A `vllmx_core.weights.WeightSource` that is read while `check` raises nothing."""

    def __init__(self, source: WeightSource, check: Callable[[], None]) -> None:
        self._source, self._check = source, check

    def names(self) -> Collection[str]:
        """See `vllmx_core.weights.WeightSource.names`."""
        return self._source.names()

    def part(self, name: str) -> WeightPart:
        """See `vllmx_core.weights.WeightSource.part`."""
        self._check()
        return self._source.part(name)

    def close(self) -> None:
        """See `vllmx_core.weights.WeightSource.close`."""
        self._source.close()
