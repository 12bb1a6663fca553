"""Plans attention on the host: assigns parts of the context to blocks of the device.

A work item is one query token and one range of positions (`kernels/paged_decode.cu`). Items are
data, not launch parameters: a captured graph launches as many as its bucket can have, and marks
unused ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from vllmx_core.ops.attention import first_seen
from vllmx_core.plan import I32, I64, StepPlan

from vllmx_cuda.program.step_arrays import Places, Segments, StepArray, segment_starts

MIN_SPLIT = 128
"""The fewest positions worth a block of their own; a multiple of every page size."""
WAVES = 4
"""Blocks of attention per processor, if the context is long enough to be split so far."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """The positions that a query token of a layer sees."""

    reach: int = 0
    """See `AttentionSpec.reach`."""
    causal: bool = True
    segments: Segments | None = None
    """The segments of `segments_of`, where a token sees those of its own in this step instead of
    pages."""
    spans: bool = False
    """True if tokens of one image see each other; see `AttentionSpec.spans`."""


@dataclass(frozen=True, slots=True)
class TileKind:
    """Tiles of a kernel for prompts."""

    tokens: int
    """The most tokens that a tile holds."""
    segments: Segments | None = None
    """The segments that bound what tokens see, see `Visibility.segments`."""


@dataclass(frozen=True, slots=True)
class WorkKinds:
    """The kinds of work in a model's layers: items for each visibility, and tiles of each kind for
    rows with more than one token; without tiles, items for those rows too."""

    visibilities: tuple[Visibility, ...]
    tiles: tuple[TileKind, ...]
    arrays: tuple[StepArray, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Items of one step for the layers of one visibility."""

    items: I32  # (N, 4) token, row, begin, end; token -1: unused
    first_item: I32  # (T + 1,)

    @property
    def num_items(self) -> int:
        return int(self.items.shape[0])


@dataclass(frozen=True, slots=True)
class StepWork:
    """All work of one step: items by visibility, and the tiles of each size."""

    items: Mapping[Visibility, WorkItems]
    tiles: tuple[I32, ...]


def item_capacity(num_tokens: int, num_processors: int, blocks_an_item: int) -> int:
    """Items that a step of so many tokens can have: one for each token, and as many more as keep
    all processors busy. `blocks_an_item`: the grid's second dimension."""
    return num_tokens + -(-WAVES * num_processors // blocks_an_item)


def segments_of(plan: StepPlan, segments: Segments | None) -> StepPlan:
    """The step as attention without pages sees it: each segment is a row that begins in it, at
    position 0. The step itself for None."""
    if segments is None:
        return plan
    starts = segment_starts(plan, segments)
    places, counts = Places(segments).values(plan), np.diff(starts).astype(np.int32)
    return replace(plan, query_start=starts, positions=places, context_len=counts)


def item_tokens(plan: StepPlan, kinds: WorkKinds) -> int:
    """Tokens that get items, in whatever layer has most: all, or with tiles those of rows and
    segments of one token."""
    if not kinds.tiles:
        return plan.num_tokens
    starts = [segment_starts(plan, one) for one in {seen.segments for seen in kinds.visibilities}]
    return max(int((np.diff(each) == 1).sum()) for each in starts)


def plan_all_items(
    plan: StepPlan, kinds: WorkKinds, num_tokens: int, capacity: int
) -> dict[Visibility, WorkItems]:
    """The items of each visibility; see `plan_items`."""
    single = bool(kinds.tiles)
    return {
        seen: plan_items(plan, seen, num_tokens, capacity, single_rows_only=single)
        for seen in kinds.visibilities
    }


def plan_tiles(plan: StepPlan, kind: TileKind) -> I32:
    """(N, 4) row, first token, tokens, position of the first token: the tiles of all rows that
    bring more than one token (`kernels/paged_prefill.cu`), those with the longest context first, so
    that the short ones fill the gaps at the end. Of segments the row is its first token: all look
    into one table of the step's tokens, each from there on."""
    tile_tokens = kind.tokens
    plan = segments_of(plan, kind.segments)
    counts = np.diff(plan.query_start).astype(np.int64)  # (R,)
    pieces = np.where(counts > 1, -(-counts // tile_tokens), 0)
    row = np.repeat(np.arange(plan.num_rows), pieces)
    index = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = plan.query_start[row] + index * tile_tokens
    size = np.minimum(tile_tokens, plan.query_start[row + 1] - first)
    position = plan.positions[first]
    order = np.argsort(-position, kind="stable")
    where = plan.query_start[row] if kind.segments else row
    return np.stack([where, first, size, position], axis=1).astype(np.int32)[order]


def plan_items(
    plan: StepPlan,
    visibility: Visibility,
    num_tokens: int,
    capacity: int,
    *,
    single_rows_only: bool = False,
) -> WorkItems:
    """Items in the order of their tokens, cut at multiples of one length, so that no more than
    `capacity` of them come out.

    Args:
        visibility: of segments an item's row is its first token, as in `plan_tiles`.
        num_tokens: T with padding; tokens beyond the plan's own get no item.
        capacity: at least as many as tokens that get items.
        single_rows_only: tokens of rows that bring more than one get none.
    """
    plan = segments_of(plan, visibility.segments)
    begin, end, rows = _ranges(plan, visibility)
    if single_rows_only:
        end = np.where(np.diff(plan.query_start)[rows] == 1, end, begin)
    wanted = end > begin
    spare = capacity - int(wanted.sum())
    first = begin // MIN_SPLIT
    # sum(ceil(length / split)) <= sum(length) / split + T <= capacity
    units = np.where(wanted, -(-end // MIN_SPLIT) - first, 0)  # (T,) of MIN_SPLIT positions each
    split = max(1, -(-int(units.sum()) // spare)) if spare else int(units.max(initial=1))
    counts = -(-units // split)  # (T,)
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    assert total <= capacity, (total, capacity)
    token = np.repeat(np.arange(plan.num_tokens), counts)
    index = np.arange(total) - starts[token]
    cut = (first[token] + index * split) * MIN_SPLIT
    items = np.full((capacity, 4), -1, np.int32)
    items[:total, 0] = token
    items[:total, 1] = plan.query_start[rows[token]] if visibility.segments else rows[token]
    items[:total, 2] = np.maximum(begin[token], cut)
    items[:total, 3] = np.minimum(end[token], cut + split * MIN_SPLIT)
    first_item = np.full(num_tokens + 1, total, np.int32)
    first_item[: plan.num_tokens + 1] = starts
    return WorkItems(items, first_item)


def _ranges(plan: StepPlan, visibility: Visibility) -> tuple[I64, I64, I64]:
    """The first position that each token sees, the one after the last, and its row."""
    rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start))
    positions = plan.positions.astype(np.int64)
    context = plan.context_len.astype(np.int64)[rows]
    reach = visibility.reach
    begin = np.maximum(0, first_seen(positions, reach))
    if visibility.causal:
        seen = plan.visible_to if visibility.spans else None
        return begin, (positions if seen is None else seen.astype(np.int64)) + 1, rows
    end = np.minimum(context, positions + reach) if reach else context
    return begin, end, rows
