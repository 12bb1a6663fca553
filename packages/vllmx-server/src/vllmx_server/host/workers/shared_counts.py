"""Counts of all workers in shared memory.

Each worker writes its own row and reads the others, so it checks a limit of the whole server
without a call. As workers may count at the same moment, a limit may be exceeded by their number.
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
"""Buckets of a table. Names that share one are counted together by other workers."""
_WIDTH = len(_FIELDS) + len(_TABLES) * _BUCKETS


class SharedCounts:
    """The memory in one worker or in the supervisor.

    Args:
        descriptor: from `SharedCounts.memory`.
        row: the row of this worker.
        seed: keeps secret which names share a bucket.
    """

    def __init__(self, descriptor: int, rows: int, row: int, seed: int) -> None:
        memory = mmap.mmap(descriptor, rows * _WIDTH * 8)
        self._rows: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64).reshape(rows, _WIDTH)
        self._own = self._rows[row]
        self._seed = seed

    @staticmethod
    def memory(rows: int) -> int:
        """A descriptor of memory for so many workers, freed with its last copy."""
        if hasattr(os, "memfd_create"):
            made = os.memfd_create("vllmx-counts")
        else:
            with tempfile.TemporaryFile() as file:
                made = os.dup(file.fileno())
        os.ftruncate(made, rows * _WIDTH * 8)
        return made

    def clear(self, row: int) -> None:
        """Clears the counts of a worker that has ended."""
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
