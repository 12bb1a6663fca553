"""The adapters of a loaded model, as native/adapt.cpp finds them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import Structure

import numpy as np
from vllmx_core.adapters import Adapter, AdapterRoom, AdapterTargets
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.tensor import f32_to_bf16

from vllmx_cpu.structs import ints, pointers


class VxLowRank(Structure):
    """The change of some columns of a product; native/adapt.cpp."""

    _fields_ = [*pointers("a b"), *ints("rank begin end")]


_LANES, _TILE = 16, 64
"""`TILE` of native/adapt.cpp."""


class CpuAdapters:
    """A table of changes for each weight, (slots, parts), which ops point to.

    Args:
        half: numbers are bf16, as suits a model of 16 bits.

    Attributes:
        rank: the greatest that an adapter may have.
    """

    def __init__(self, room: AdapterRoom, targets: AdapterTargets, *, half: bool) -> None:
        self.rank, self.half = room.rank, half
        self.parts: Mapping[str, int] = targets.num_parts
        self._targets = targets
        self._tables = {
            name: (VxLowRank * (room.slots * parts))() for name, parts in self.parts.items()
        }
        self._arrays: dict[int, list[AnyArray]] = {}
        """The numbers of each slot, which the tables point to."""

    def shrunk_numbers(self, name: str) -> int:
        """Numbers between A and B of one token at a weight."""
        return self.rank * self.parts[name]

    def table(self, name: str) -> int:
        """The address of a weight's table."""
        return ctypes.addressof(self._tables[name])

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """See `vllmx_core.backend.HasAdapters.set_adapter`; no step may run."""
        found = {} if adapter is None else self._targets.pieces(adapter)
        arrays: list[AnyArray] = []
        for name, table in self._tables.items():
            first = slot * self.parts[name]
            for place in range(self.parts[name]):
                table[first + place] = VxLowRank()
            for place, piece in enumerate(found.get(name, ())):
                if self._targets.is_table(name):
                    a: AnyArray = np.ascontiguousarray(piece.a.T)
                else:
                    a = self._stored(self._filled(piece.a, _LANES))
                b = self._stored(self._tiled(piece.b.T))
                arrays += (a, b)
                table[first + place] = VxLowRank(
                    a.ctypes.data, b.ctypes.data, piece.b.shape[1], piece.begin, piece.end
                )
        self._arrays[slot] = arrays

    def _filled(self, rows: F32, unit: int) -> F32:
        """The rows with zeros behind each up to whole units."""
        return np.pad(rows, [(0, 0), (0, -rows.shape[1] % unit)])

    def _stored(self, rows: F32) -> AnyArray:
        return f32_to_bf16(rows) if self.half else np.ascontiguousarray(rows, np.float32)

    def _tiled(self, b: F32) -> F32:
        """(r, N) as (tiles, r, _TILE)."""
        filled = self._filled(b, _TILE)
        return filled.reshape(len(b), -1, _TILE).swapaxes(0, 1)
