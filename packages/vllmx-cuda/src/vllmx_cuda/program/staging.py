"""Copies a step's arrays to the device: packed into one pinned buffer, in one copy.

A `Layout` depends only on the padded sizes, so the addresses in a captured graph stay valid for
every step of its bucket. The block table stays on the device: a step sends the entries that
changed, and its first kernel writes them. If too many changed, the table is sent in a copy of its
own, row by row to a fixed pitch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, I32, AnyArray, SamplingRows, StepPlan

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.program.step_arrays import StepArray, StepSizes
from vllmx_cuda.program.work import StepWork, TileKind, Visibility, WorkKinds

ALIGNMENT = 256
SLOTS = 2
"""Steps in flight, each with a pinned buffer of its own."""


PARAMETERS: dict[str, tuple[npt.DTypeLike, float]] = {
    "temperature": (np.float32, 0),
    "target": (np.int32, -1),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_x": (np.float32, -np.inf),
    "seed": (np.uint64, 0),
    "position": (np.int32, 0),
    "repetition_penalty": (np.float32, 1),
    "frequency_penalty": (np.float32, 0),
    "presence_penalty": (np.float32, 0),
    "num_logprobs": (np.int32, -1),
}
"""Name -> type, and the value of padding rows, which are greedy and never read."""
_GREEDY = ("temperature", "target")


def parameter_bytes(name: str, rows: int) -> int:
    return np.dtype(PARAMETERS[name][0]).itemsize * rows


def is_plain(rows: SamplingRows) -> bool:
    """True if ids depend only on the logits and the parameters of each row, so that the launches
    are the same at every step."""
    return rows.edits is None and rows.counts is None and rows.masks is None


def read_parameters(rows: SamplingRows) -> Sequence[str]:
    """Parameters that the kernels of this step read."""
    if rows.all_greedy and rows.max_logprobs < 0 and is_plain(rows):
        return _GREEDY
    return tuple(PARAMETERS)


def parameter(rows: SamplingRows, name: str) -> AnyArray:
    """(L,) as the kernels read it."""
    if name == "min_x":
        return _min_x(rows.min_p)
    values: AnyArray = getattr(rows, name)
    return values


def _min_x(min_p: F32) -> F32:
    """ln(min_p) as the reference rounds it; -inf: off."""
    with np.errstate(divide="ignore"):
        return np.log(min_p.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Layout:
    """The offset in bytes of each array of a step in the packed buffer."""

    sizes: StepSizes
    tokens: int
    positions: int
    slots: tuple[int, ...]
    logit_rows: int
    context_len: int
    items: tuple[int, ...]
    """One for each visibility, as is `first_items`."""
    first_items: tuple[int, ...]
    tiles: tuple[int, ...]
    patches: int
    states: tuple[int, ...]
    """Row of each token, query_start, state_from, state_to, state_after; none without states."""
    arrays: tuple[int, ...]
    """Offsets of the arrays in `WorkKinds.arrays`."""
    parameters: Mapping[str, int]
    """The offsets of the sampler's parameters, behind everything else."""
    num_bytes: int

    @property
    def parameters_begin(self) -> int:
        """The byte at which the sampler's parameters begin."""
        return min(self.parameters.values())

    @classmethod
    def of(cls, sizes: StepSizes, kinds: WorkKinds) -> Layout:
        end, num_visibilities = 0, len(kinds.visibilities)

        def take_bytes(num_bytes: int) -> int:
            nonlocal end
            begin, end = end, -(-(end + num_bytes) // ALIGNMENT) * ALIGNMENT
            return begin

        def take(count: int) -> int:
            return take_bytes(4 * count)

        tokens, positions = take(sizes.tokens), take(sizes.tokens)
        slots = tuple(take(sizes.tokens) for _ in range(sizes.groups))
        logit_rows, context_len = take(sizes.logit_rows), take(sizes.rows)
        items = tuple(take(4 * sizes.items) for _ in range(num_visibilities))
        first_items = tuple(take(sizes.tokens + 1) for _ in range(num_visibilities))
        tiles = tuple(take(4 * count) for count in sizes.tiles)
        patches = take(2 * sizes.patches)
        states = tuple(take(count) for count in _state_counts(sizes))
        arrays = tuple(take(sizes.words(array)) for array in kinds.arrays)
        parameters = {
            name: take_bytes(parameter_bytes(name, sizes.logit_rows)) for name in PARAMETERS
        }
        return cls(
            sizes,
            tokens,
            positions,
            slots,
            logit_rows,
            context_len,
            items,
            first_items,
            tiles,
            patches,
            states,
            arrays,
            parameters,
            end,
        )


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The memory that names the states which the rows of a step read, and those that they leave."""

    token_rows: Memory
    query_start: Memory
    state_from: Memory
    state_to: Memory
    state_after: Memory


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The same arrays on the device."""

    tokens: Memory
    positions: Memory
    slots: tuple[Memory, ...]
    """The places of new tokens in each cache group, as are `block_tables`."""
    logit_rows: Memory
    items: Mapping[Visibility, Memory]
    first_item: Mapping[Visibility, Memory]
    context_len: Memory
    tiles: Mapping[TileKind, Memory]
    arrays: Mapping[StepArray, Memory]
    patches: Memory
    """(N, 2) index into all block tables, -1: unused, and the entry."""
    parameters: Mapping[str, Memory]
    """The parameters of the sampler, one a logit row; see `vllmx_cuda.program.parameters`."""
    block_tables: tuple[Memory, ...]
    table_stride: int
    states: StateMemory | None = None


class Staging:
    """Buffers for the steps of one model.

    Args:
        num_bytes: of the largest layout.
        max_rows, max_blocks: of each block table.
        groups: cache groups.
    """

    def __init__(
        self,
        device: Device,
        kinds: WorkKinds,
        num_bytes: int,
        max_rows: int,
        max_blocks: int,
        groups: int = 1,
    ) -> None:
        self._device = device
        self._kinds = kinds
        self.num_bytes = num_bytes
        self._max_blocks = max_blocks
        self._packed = device.zeros(num_bytes)
        self.tables = device.zeros(4 * groups * max_rows * max_blocks)
        self._sent = np.zeros((groups, max_rows, max_blocks), np.int32)
        """The tables as the device has them once all that was enqueued has run."""
        self._pinned = [device.pinned(num_bytes) for _ in range(SLOTS)]
        self._pinned_tables = [[device.pinned(0) for _ in range(groups)] for _ in range(SLOTS)]
        self._next = 0

    def layout(self, sizes: StepSizes) -> Layout:
        return Layout.of(sizes, self._kinds)

    def memory(self, layout: Layout) -> StepMemory:
        """Spans of the device buffer; the same for equal layouts."""
        sizes = layout.sizes
        return StepMemory(
            tokens=self._packed.at(layout.tokens, 4 * sizes.tokens),
            positions=self._packed.at(layout.positions, 4 * sizes.tokens),
            slots=tuple(self._packed.at(begin, 4 * sizes.tokens) for begin in layout.slots),
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
                kind: self._packed.at(at, 16 * count)
                for kind, at, count in zip(
                    self._kinds.tiles, layout.tiles, sizes.tiles, strict=True
                )
            },
            arrays={
                array: self._packed.at(at, 4 * sizes.words(array))
                for array, at in zip(self._kinds.arrays, layout.arrays, strict=True)
            },
            patches=self._packed.at(layout.patches, 8 * sizes.patches),
            parameters={
                name: self._packed.at(at, parameter_bytes(name, sizes.logit_rows))
                for name, at in layout.parameters.items()
            },
            block_tables=tuple(map(self._table, range(sizes.groups))),
            table_stride=self._max_blocks,
            states=self._states(layout),
        )

    def _states(self, layout: Layout) -> StateMemory | None:
        if not layout.states:
            return None
        counts = _state_counts(layout.sizes)
        spans = zip(layout.states, counts, strict=True)
        return StateMemory(*(self._packed.at(begin, 4 * count) for begin, count in spans))

    def upload(
        self, plan: StepPlan, rows: SamplingRows | None, layout: Layout, work: StepWork
    ) -> None:
        """Packs a step and enqueues its copy; plan and rows may change afterwards. Padding tokens
        are id 0 at position 0 and write to no slot. Without rows, `upload_parameters` follows."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        packed, sizes = self._pinned[slot], layout.sizes
        _put(packed, layout.tokens, sizes.tokens, plan.tokens, 0)
        _put(packed, layout.positions, sizes.tokens, plan.positions, 0)
        for begin, slots in zip(layout.slots, plan.slots, strict=True):
            _put(packed, begin, sizes.tokens, slots, -1)
        _put(packed, layout.logit_rows, sizes.logit_rows, plan.logit_rows, 0)
        _put(packed, layout.context_len, sizes.rows, plan.context_len, 0)
        for index, visibility in enumerate(self._kinds.visibilities):
            found = work.items[visibility]
            _put(packed, layout.items[index], 4 * sizes.items, found.items.reshape(-1), -1)
            begin = layout.first_items[index]
            _put(packed, begin, sizes.tokens + 1, found.first_item, found.num_items)
        for begin, count, tiles in zip(layout.tiles, sizes.tiles, work.tiles, strict=True):
            _put(packed, begin, 4 * count, tiles.reshape(-1), 0)
        patches = self._patches(plan, sizes.patches, slot)
        _put(packed, layout.patches, 2 * sizes.patches, patches.reshape(-1), -1)
        if layout.states:
            _put_states(packed, layout, plan)
        for array, begin in zip(self._kinds.arrays, layout.arrays, strict=True):
            _put(packed, begin, sizes.words(array), array.values(plan), array.padding)
        end = layout.parameters_begin
        if rows is not None:
            _put_parameters(packed, layout, rows)
            end = layout.num_bytes
        self._device.upload(self._packed, packed[:end])

    def upload_parameters(self, rows: SamplingRows, layout: Layout) -> None:
        """Enqueues the copy of the parameters that the last `upload` left out: they are in the same
        pinned buffer, in a part that its copy does not read."""
        packed, begin = self._pinned[self._next - 1], layout.parameters_begin
        _put_parameters(packed, layout, rows)
        target = self._packed.at(begin, layout.num_bytes - begin)
        self._device.upload(target, packed[begin : layout.num_bytes])

    def _table(self, group: int) -> Memory:
        num_bytes = self._sent[group].nbytes
        return self.tables.at(group * num_bytes, num_bytes)

    def _patches(self, plan: StepPlan, capacity: int, slot: int) -> I32:
        """(N, 2) where the plan's block tables differ from those on the device; none of a group
        whose whole table is sent, because more entries differ than are left of `capacity`."""
        found = [] if plan.block_tables else [np.zeros((0, 2), np.int32)]
        for group, table in enumerate(plan.block_tables):
            found.append(self._patches_of(group, table, capacity, slot))
            capacity -= len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _patches_of(self, group: int, table: I32, capacity: int, slot: int) -> I32:
        rows, blocks = table.shape
        blocks = min(blocks, self._max_blocks)
        table, sent = table[:, :blocks], self._sent[group, :rows, :blocks]
        # found in one dimension: numpy is ten times slower in two
        row, column = np.divmod(np.flatnonzero(table != sent), max(1, blocks))
        patches = np.empty((len(row), 2), np.int32)
        if len(row) <= capacity:
            patches[:, 0] = row * self._max_blocks + column + group * self._sent[group].size
            patches[:, 1] = sent[row, column] = table[row, column]
            return patches
        sent[...] = table
        num_bytes = 4 * rows * blocks
        pinned = self._pinned_tables[slot]
        if num_bytes > pinned[group].nbytes:
            pinned[group] = self._device.pinned(2 * num_bytes)
        packed = pinned[group][:num_bytes]
        packed.view(np.int32).reshape(rows, blocks)[...] = table
        self._device.upload_rows(self._table(group), 4 * self._max_blocks, packed, 4 * blocks)
        return patches[:0]


def _state_counts(sizes: StepSizes) -> tuple[int, ...]:
    """Values of each array in `Layout.states`."""
    tokens, rows = sizes.tokens, sizes.rows
    return (tokens, rows + 1, rows, rows, tokens) if sizes.has_states else ()


def _put_states(packed: Bytes, layout: Layout, plan: StepPlan) -> None:
    """Padding tokens belong to no row; padding rows have no tokens and write no state."""
    token_rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start))
    none = np.zeros(0, np.int32)  # of a step that is padding alone
    source = none if plan.state_from is None else plan.state_from
    target = none if plan.state_to is None else plan.state_to
    after = none if plan.state_after is None else plan.state_after
    values: tuple[AnyArray, ...] = (token_rows, plan.query_start, source, target, after)
    paddings = (-1, plan.num_tokens, -1, -1, -1)
    counts = _state_counts(layout.sizes)
    for begin, count, some, padding in zip(layout.states, counts, values, paddings, strict=True):
        _put(packed, begin, count, some, padding)


def _put_parameters(packed: Bytes, layout: Layout, rows: SamplingRows) -> None:
    for name in read_parameters(rows):
        kind, padding = PARAMETERS[name]
        begin, values = layout.parameters[name], parameter(rows, name)
        num_bytes = parameter_bytes(name, layout.sizes.logit_rows)
        target = packed[begin : begin + num_bytes].view(kind)
        target[: len(values)] = values
        target[len(values) :] = padding


def _put(packed: Bytes, begin: int, count: int, values: AnyArray, padding: int) -> None:
    """`values` as int32 from byte `begin` on, padded to `count` of them."""
    target = packed[begin : begin + 4 * count].view(np.int32)
    target[: len(values)] = values
    target[len(values) :] = padding
