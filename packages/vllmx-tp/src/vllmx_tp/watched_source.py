"""The weights of rank 0, which stops reading where another rank cannot load its part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from vllmx_core.weights.files import FileRange
from vllmx_core.weights.part import RawTensor, Span, WeightPart, WeightSource, made_part


class WatchedSource:
    """A `WeightSource` that is read while `check` raises nothing. Backends may
    take all parts first and read their bytes later, so the reads themselves are watched."""

    def __init__(self, source: WeightSource, check: Callable[[], None]) -> None:
        self._source, self._check = source, check

    def names(self) -> Collection[str]:
        """See `vllmx_core.weights.part.WeightSource.names`."""
        return self._source.names()

    def part(self, name: str) -> WeightPart:
        """See `vllmx_core.weights.part.WeightSource.part`."""
        self._check()
        return self._watched(self._source.part(name))

    def close(self) -> None:
        """See `vllmx_core.weights.part.WeightSource.close`."""
        self._source.close()

    def _watched(self, part: WeightPart) -> WeightPart:
        """The same part, which is watched when it is read or made."""
        cut, narrower = part.cut, part.narrow
        if cut is None:
            buffers = {key: self._read_watched(raw) for key, raw in part.buffers.items()}
            return replace(part, buffers=buffers)

        def make(begin: int, end: int) -> WeightPart:
            self._check()
            return self._watched(cut(begin, end))

        def narrow(_: WeightPart, rows: Span, cols: Span) -> WeightPart | None:
            found = None if narrower is None else narrower(part, rows, cols)
            return None if found is None else self._watched(found)

        return made_part(
            part.name,
            part.shape,
            part.layout,
            make,
            coded=part.coded is not None,
            narrow=None if narrower is None else narrow,
        )

    def _read_watched(self, raw: RawTensor) -> RawTensor:
        if not isinstance(raw.stored, FileRange):
            return raw
        return replace(raw, stored=replace(raw.stored, before_read=self._check))
