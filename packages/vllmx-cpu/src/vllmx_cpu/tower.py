"""The tower of a loaded model: passes over images, with as much memory as the largest one needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import Structure
from dataclasses import replace

import numpy as np
from vllmx_core.plan import StepPlan

from vllmx_cpu.images import allocate_turned
from vllmx_cpu.lowering.images import VxDownsample
from vllmx_cpu.lowering.site import Lowering
from vllmx_cpu.lowering.table import lower_all
from vllmx_cpu.memory import Bytes, allocate
from vllmx_cpu.native import library
from vllmx_cpu.packing import TILE_ROWS
from vllmx_cpu.planning import TowerSizes
from vllmx_cpu.structs import VxLinear, VxRecord, VxSegmentAttention
from vllmx_cpu.tape import Call, Tape, make_tape

_LARGEST = 1 << 21
"""A pass in parts does so many multiplications for each patch at once: ten milliseconds for 1,024
patches and two cores."""
_TILE_QUERIES = 64
"""Attention does so many queries of a head at once."""


class CpuTower:
    """The tape of a tower over buffers of its own, which are made anew for a pass larger than those
    before: pages that no pass has touched take no memory, so they may be twice as large as it.

    Args:
        lowering: of the model; weights and the store of features are common to both
    """

    def __init__(self, lowering: Lowering, sizes: TowerSizes) -> None:
        self.lowering, self.ops = lowering, sizes.ops
        self._sizes = sizes
        self._size = (0, 0, 0)
        """Patches, images and windows that there is room for."""
        self._arena: Bytes | None = None
        self._tape: Tape | None = None
        self._parts: Tape | None = None
        """The same with large products in pieces, for passes that stop on the way."""
        self._ends = np.zeros(0)
        """The end of each record of a pass in parts, as a share of the pass."""

    def make_room(self, plan: StepPlan) -> None:
        """Makes the buffers large enough for a pass. None may be in flight. Raises
        CapacityError."""
        wanted = (plan.num_tokens, plan.num_rows, _num_windows(plan))
        sizes = list(zip(wanted, self._size, strict=True))
        if all(new <= old for new, old in sizes):
            return
        patches, images, windows = (max(_power_of_two(new), old) for new, old in sizes)
        room = self._sizes.room(patches, images, windows)
        self._size = (0, 0, 0)
        self._tape = self._parts = self._arena = None
        self.lowering = replace(
            self.lowering,
            panels=allocate(room.panel_bytes),
            workspace=allocate(room.workspace_bytes),
            turned=allocate_turned(self.ops.ops, patches),
        )
        self._arena = allocate(room.arena.num_bytes)
        base = int(self._arena.ctypes.data)
        self._tape = make_tape(lower_all(self.lowering, self.ops.ops, room.arena.offsets, base))
        whole = [(call, _cost(call.arguments, patches, windows)) for call in self._tape.calls]
        pieces = [piece for call, cost in whole for piece in _pieces(call, cost, patches)]
        self._parts = make_tape(pieces)
        costs = [_cost(call.arguments, patches, windows) for call in pieces]
        self._ends = np.cumsum(costs) / sum(costs)
        self._size = (patches, images, windows)

    def part(self, begin: float, end: float) -> list[VxRecord]:
        """The records of a part of the largest pass so far, by what ops cost."""
        assert self._tape is not None, "make_room came first"
        assert self._parts is not None, "it is made with the tape"
        if (begin, end) == (0.0, 1.0):
            return list(self._tape.records)
        return self._parts.records[self._place(begin) : self._place(end)]

    def _place(self, share: float) -> int:
        """The number of records that have run when so much of the pass has."""
        if share >= 1.0:
            return len(self._ends)
        return int(np.searchsorted(self._ends, share, side="right"))


def _pieces(call: Call, cost: float, num_patches: int) -> Iterator[Call]:
    """A large product as several, each of some rows of its matrix, and long attention as several,
    each of some queries; any other call itself."""
    if isinstance(call.arguments, VxLinear) and not call.arguments.w.gated:
        yield from _products(call, call.arguments)
    elif isinstance(call.arguments, VxSegmentAttention) and cost > _LARGEST:
        shares = call.arguments.num_heads * math.ceil(num_patches / _TILE_QUERIES)
        pieces = min(math.ceil(cost / _LARGEST), shares)
        for number in range(pieces):
            piece = VxSegmentAttention.from_buffer_copy(call.arguments)
            piece.piece, piece.pieces = number, pieces
            yield Call(call.name, call.function, piece, call.pooled)
    else:
        yield call


def _products(call: Call, given: VxLinear) -> Iterator[Call]:
    matrix = given.w
    each = max(1, _LARGEST // (TILE_ROWS * matrix.cols))
    for tile in range(0, matrix.tiles, each):
        row, tiles = tile * TILE_ROWS, min(each, matrix.tiles - tile)
        piece = VxLinear.from_buffer_copy(given)
        piece.w.data = matrix.data + library().vx_packed_bytes(tile, matrix.cols, matrix.kind)
        piece.w.bias = None if matrix.bias is None else matrix.bias + 4 * row
        piece.w.rows = min(matrix.rows - row, tiles * TILE_ROWS)
        piece.w.tiles = tiles
        piece.y = given.y + 4 * row
        yield Call(call.name, call.function, piece, call.pooled)


def _cost(arguments: Structure, num_patches: int, num_windows: int) -> float:
    """The cost of a call for each row: about its multiplications, those of attention as measured
    against those of products, and 64 for a number that is read."""
    if isinstance(arguments, VxLinear):
        return float(arguments.w.rows * arguments.w.cols)
    if isinstance(arguments, VxSegmentAttention):
        seen = num_patches / num_windows if arguments.images else num_patches
        whole = 5 * arguments.num_heads * arguments.head_size * seen
        return float(whole / arguments.pieces)
    if isinstance(arguments, VxDownsample):
        return arguments.products
    return 64.0 * (getattr(arguments, "width", 0) + 64)


def _num_windows(plan: StepPlan) -> int:
    windows = None if plan.patches is None else plan.patches.windows
    return 0 if windows is None else len(windows) - 1


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least else 0
