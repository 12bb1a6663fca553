"""Rows of a cache in the host's memory, for `vllmx_core.backend.MovableRows`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from vllmx_core.plan import I32, U8, AnyArray


class CopiedOut:
    """A `CopyOut` that is done."""

    def __init__(self, data: U8) -> None:
        self._data = data

    def result(self) -> U8:
        return self._data


class HostRows:
    """Row n is the nth entry of each of these arrays, one after the other. Arrays that layers share
    count once.

    Args:
        settle: waits for the steps in flight.
    """

    def __init__(self, arrays: Sequence[AnyArray], settle: Callable[[], None]) -> None:
        parts = {array.ctypes.data: array for array in arrays if array.size}
        self._parts = [part.view(np.uint8).reshape(len(part), -1) for part in parts.values()]
        ends = np.cumsum([0, *(part.shape[1] for part in self._parts)]).tolist()
        self._spans = [slice(*span) for span in pairwise(ends)]
        self._width = ends[-1]
        self._settle = settle

    def copy_out(self, rows: I32) -> CopiedOut:
        """See `vllmx_core.backend.MovableRows.copy_out`."""
        data = np.empty((len(rows), self._width), np.uint8)
        for part, span in zip(self._parts, self._spans, strict=True):
            data[:, span] = part[rows]
        return CopiedOut(data)

    def copy_in(self, rows: I32, data: U8) -> None:
        """See `vllmx_core.backend.MovableRows.copy_in`."""
        self._settle()
        for part, span in zip(self._parts, self._spans, strict=True):
            part[rows] = data[:, span]
