"""Copies of KV blocks and state slots, for `vllmx_core.backend.HasMovableCache`. They are made in
the owner's thread, behind the steps that were built before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import mlx.core as mx
import numpy as np
from vllmx_core.plan import I32, U8

from vllmx_metal.kv_cache import LayerPages, Pages
from vllmx_metal.owner import Owner
from vllmx_metal.recurrent import States

Place = tuple[Pages | States, str, int]
"""The holder of an array, the array's name in it, and how many of its entries are one row."""


def block_places(pages: Sequence[LayerPages], num_blocks: int) -> list[Place]:
    """All keys, values and scales; those that layers share once."""
    halves = {id(half): half for page in pages for half in (page.k, page.v)}
    return [
        (half, name, len(getattr(half, name)) // num_blocks)
        for half in halves.values()
        for name in ("data", "scales")
        if getattr(half, name) is not None and getattr(half, name).size
    ]


class MetalRows:
    """`vllmx_core.backend.MovableRows` of arrays that every write replaces.

    Args:
        settle: waits for the step that runs, in the owner's thread.
    """

    def __init__(self, places: Sequence[Place], owner: Owner, settle: Callable[[], None]) -> None:
        self._places, self._owner, self._settle = places, owner, settle

    def copy_out(self, rows: I32) -> Future[U8]:
        rows = rows.copy()
        return self._owner.submit(lambda: self._read(rows))

    def copy_in(self, rows: I32, data: U8) -> None:
        rows, data = rows.copy(), data.copy()
        self._owner.submit(lambda: self._write(rows, data)).result()

    def _read(self, rows: I32) -> U8:
        """Nothing that was taken is left unevaluated: it would hold all pages."""
        taken = [np.zeros((len(rows), 0), np.uint8)]  # a model may keep states alone
        for holder, name, count in self._places:
            part = mx.take(getattr(holder, name), _entries(rows, count), axis=0)
            taken.append(np.array(mx.view(part.reshape(len(rows), -1), mx.uint8)))
        return np.concatenate(taken, axis=1)

    def _write(self, rows: I32, data: U8) -> None:
        """Waits for the step that runs, which holds the pages: they would be copied."""
        self._settle()
        begin = 0
        for holder, name, count in self._places:
            array = getattr(holder, name)
            size = array[0].nbytes * count
            part = mx.array(np.ascontiguousarray(data[:, begin : begin + size]))
            array[_entries(rows, count)] = mx.view(part, array.dtype).reshape(-1, *array.shape[1:])
            setattr(holder, name, array)
            mx.eval(array)
            begin += size


def _entries(rows: I32, count: int) -> mx.array:
    """The entries of rows that have `count` each."""
    return mx.array((rows[:, None] * count + np.arange(count, dtype=np.int32)).ravel())
