"""Weights of rank 0, which stops reading when another rank cannot load its part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from vllmx_core.weights.files import FileRange
from vllmx_core.weights.part import WeightPart, WeightSource
from vllmx_core.weights.tensor import RawTensor


class WatchedSource:
    """A `WeightSource` whose reads call `check` first. Backends may take all parts first and read
    their bytes later, so each read is watched."""

    def __init__(self, source: WeightSource, check: Callable[[], None]) -> None:
        self._source, self._check = source, check

    def names(self) -> Collection[str]:
        """See `vllmx_core.weights.part.WeightSource.names`."""
        return self._source.names()

    def part(self, name: str) -> WeightPart:
        """See `vllmx_core.weights.part.WeightSource.part`."""
        self._check()
        return self._source.part(name).with_buffers(self._watched)

    def close(self) -> None:
        """See `vllmx_core.weights.part.WeightSource.close`."""
        self._source.close()

    def _watched(self, raw: RawTensor) -> RawTensor:
        if not isinstance(raw.stored, FileRange):
            return raw
        return replace(raw, stored=replace(raw.stored, before_read=self._check))
