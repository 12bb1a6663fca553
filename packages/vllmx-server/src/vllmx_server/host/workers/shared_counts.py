"""Counts of all workers, in memory that they share.

Each worker writes a row of its own and reads those of the others, so that a limit of the whole
server is checked without asking anybody. Two workers that count at the same moment may both be let
in: a limit may be exceeded by as many as there are workers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Counted = Literal["connections", "received", "requests", "body_bytes", "text_bytes"]
_FIELDS = get_args(Counted)
Table = Literal["addresses", "clients", "sequences"]
_TABLES = get_args(Table)
_BUCKETS = 2048
"""The buckets of a table. Two names that share one are counted together, by the workers that they
are not counted in by name."""
_WIDTH = len(_FIELDS) + len(_TABLES) * _BUCKETS


class SharedCounts:
    """The memory, as one worker or the supervisor sees it.

    Args:
        descriptor: of the memory; `SharedCounts.memory` makes it.
        row: whose it is.
        seed: so that nobody outside can tell which names share a bucket.
    """

    def __init__(self, descriptor: int, rows: int, row: int, seed: int) -> None:
        memory = mmap.mmap(descriptor, rows * _WIDTH * 8)
        self._rows: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64).reshape(rows, _WIDTH)
        self._own = self._rows[row]
        self._seed = seed

    @staticmethod
    def memory(rows: int) -> int:
        """A descriptor of memory for so many workers, which goes with the last that has it."""
        if hasattr(os, "memfd_create"):
            made = os.memfd_create("vllmx-counts")
        else:
            with tempfile.TemporaryFile() as file:
                made = os.dup(file.fileno())
        os.ftruncate(made, rows * _WIDTH * 8)
        return made

    def clear(self, row: int) -> None:
        """Nothing is counted for a worker that has ended."""
        self._rows[row] = 0

    def gauge(self, counted: Counted) -> SharedGauge:
        """The gauge of a count of this worker and all others."""
        at = _FIELDS.index(counted)
        return SharedGauge(self._rows[:, at], self._own[at : at + 1])

    def value(self, counted: Counted, row: int) -> int:
        """The count of one worker."""
        return int(self._rows[row, _FIELDS.index(counted)])

    def named(self, table: Table) -> SharedNames:
        """The gauges of the counts by name of this worker and all others."""
        first = len(_FIELDS) + _TABLES.index(table) * _BUCKETS
        columns = slice(first, first + _BUCKETS)
        return SharedNames(self._rows[:, columns], self._own[columns], self._seed)


class SharedGauge:
    """See `vllmx_engine.text.gauge.Gauge`."""

    def __init__(self, column: npt.NDArray[np.int64], own: npt.NDArray[np.int64]) -> None:
        self._column, self._own = column, own

    def set(self, value: int) -> None:
        self._own[0] = value

    @property
    def elsewhere(self) -> int:
        return int(self._column.sum() - self._own[0])


class SharedNames:
    """See `vllmx_engine.text.gauge.NamedGauge`."""

    def __init__(
        self, columns: npt.NDArray[np.int64], own: npt.NDArray[np.int64], seed: int
    ) -> None:
        self._columns, self._own, self._seed = columns, own, seed

    def add(self, name: str, count: int) -> None:
        self._own[self._bucket(name)] += count

    def elsewhere(self, name: str) -> int:
        bucket = self._bucket(name)
        return int(self._columns[:, bucket].sum() - self._own[bucket])

    def gauge(self, name: str) -> SharedGauge:
        """The count of one name as a gauge."""
        at = self._bucket(name)
        return SharedGauge(self._columns[:, at], self._own[at : at + 1])

    def _bucket(self, name: str) -> int:
        return zlib.crc32(name.encode(), self._seed) % _BUCKETS
