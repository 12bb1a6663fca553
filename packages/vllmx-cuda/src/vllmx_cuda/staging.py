"""A step's arrays on their way to the device: packed into one pinned buffer, copied at once.

A `Layout` depends on the padded sizes alone, so the addresses that a captured graph has read from
once stay right for every step of its bucket. The block table goes on its own, row by row to a fixed
pitch: packed, its pitch would change with the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from vllmx_core.plan import AnyArray, StepPlan

from vllmx_cuda.device import Bytes, Device, Memory
from vllmx_cuda.work import StepWork, Visibility, WorkKinds

ALIGNMENT = 256
SLOTS = 2
"""Steps in flight, each with a pinned buffer of its own."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step with its padding."""

    tokens: int
    logit_rows: int
    rows: int
    items: int
    """Work items of each visibility; 0: none is launched."""
    tiles: tuple[int, ...]
    """Tiles of each size of tile."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each array of a step lies in the packed buffer, in bytes."""

    sizes: StepSizes
    tokens: int
    positions: int
    slots: int
    logit_rows: int
    context_len: int
    items: tuple[int, ...]
    """One for each visibility, as is `first_items`."""
    first_items: tuple[int, ...]
    tiles: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, sizes: StepSizes, num_visibilities: int) -> Layout:
        end = 0

        def take(count: int) -> int:
            nonlocal end
            begin, end = end, -(-(end + 4 * count) // ALIGNMENT) * ALIGNMENT
            return begin

        tokens, positions, slots = (take(sizes.tokens) for _ in range(3))
        logit_rows, context_len = take(sizes.logit_rows), take(sizes.rows)
        items = tuple(take(4 * sizes.items) for _ in range(num_visibilities))
        first_items = tuple(take(sizes.tokens + 1) for _ in range(num_visibilities))
        tiles = tuple(take(4 * count) for count in sizes.tiles)
        return cls(
            sizes, tokens, positions, slots, logit_rows, context_len, items, first_items, tiles, end
        )


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The same arrays on the device."""

    tokens: Memory
    positions: Memory
    slots: Memory
    logit_rows: Memory
    items: Mapping[Visibility, Memory]
    first_item: Mapping[Visibility, Memory]
    context_len: Memory
    tiles: Mapping[int, Memory]
    """By the size of tile."""
    block_table: Memory
    table_stride: int


class Staging:
    """Buffers for the steps of one model.

    Args:
        num_bytes: of the largest layout.
        max_rows, max_blocks: of the block table.
    """

    def __init__(
        self,
        device: Device,
        kinds: WorkKinds,
        num_bytes: int,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        self._device = device
        self._kinds = kinds
        self._max_blocks = max_blocks
        self._packed = device.zeros(num_bytes)
        self._table = device.zeros(4 * max_rows * max_blocks)
        self._pinned = [device.pinned(num_bytes) for _ in range(SLOTS)]
        self._pinned_tables = [device.pinned(4 * max_rows * max_blocks) for _ in range(SLOTS)]
        self._next = 0

    def layout(self, sizes: StepSizes) -> Layout:
        return Layout.of(sizes, len(self._kinds.visibilities))

    def memory(self, layout: Layout) -> StepMemory:
        """Spans of the device buffer; the same for equal layouts."""
        sizes = layout.sizes
        return StepMemory(
            tokens=self._packed.at(layout.tokens, 4 * sizes.tokens),
            positions=self._packed.at(layout.positions, 4 * sizes.tokens),
            slots=self._packed.at(layout.slots, 4 * sizes.tokens),
            logit_rows=self._packed.at(layout.logit_rows, 4 * sizes.logit_rows),
            items={
                v: self._packed.at(at, 16 * sizes.items)
                for v, at in zip(self._kinds.visibilities, layout.items, strict=True)
            },
            first_item={
                v: self._packed.at(at, 4 * (sizes.tokens + 1))
                for v, at in zip(self._kinds.visibilities, layout.first_items, strict=True)
            },
            context_len=self._packed.at(layout.context_len, 4 * sizes.rows),
            tiles={
                tokens: self._packed.at(at, 16 * count)
                for tokens, at, count in zip(
                    self._kinds.tile_tokens, layout.tiles, sizes.tiles, strict=True
                )
            },
            block_table=self._table,
            table_stride=self._max_blocks,
        )

    def upload(self, plan: StepPlan, layout: Layout, work: StepWork) -> None:
        """Packs the plan and enqueues its copies; the plan may change afterwards. Padding tokens
        are id 0 at position 0 and write to no slot."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        packed, sizes = self._pinned[slot], layout.sizes
        _put(packed, layout.tokens, sizes.tokens, plan.tokens, 0)
        _put(packed, layout.positions, sizes.tokens, plan.positions, 0)
        _put(packed, layout.slots, sizes.tokens, plan.slots, -1)
        _put(packed, layout.logit_rows, sizes.logit_rows, plan.logit_rows, 0)
        _put(packed, layout.context_len, sizes.rows, plan.context_len, 0)
        for index, visibility in enumerate(self._kinds.visibilities):
            found = work.items[visibility]
            _put(packed, layout.items[index], 4 * sizes.items, found.items.reshape(-1), -1)
            begin = layout.first_items[index]
            _put(packed, begin, sizes.tokens + 1, found.first_item, found.num_items)
        for begin, tiles in zip(layout.tiles, work.tiles, strict=True):
            _put(packed, begin, tiles.size, tiles.reshape(-1), 0)
        self._device.upload(self._packed, packed[: layout.num_bytes])
        self._upload_table(plan, slot)

    def _upload_table(self, plan: StepPlan, slot: int) -> None:
        rows, blocks = plan.block_table.shape
        blocks = min(blocks, self._max_blocks)
        if not rows or not blocks:
            return
        packed = self._pinned_tables[slot][: 4 * rows * blocks]
        packed.view(np.int32).reshape(rows, blocks)[...] = plan.block_table[:, :blocks]
        self._device.upload_rows(self._table, 4 * self._max_blocks, packed, 4 * blocks)


def _put(packed: Bytes, begin: int, count: int, values: AnyArray, padding: int) -> None:
    """`values` as int32 from byte `begin` on, padded to `count` of them."""
    target = packed[begin : begin + 4 * count].view(np.int32)
    target[: len(values)] = values
    target[len(values) :] = padding
