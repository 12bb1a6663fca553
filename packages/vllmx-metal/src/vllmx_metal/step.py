"""One step's plan as MLX arrays, and how its attention is cut into batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from vllmx_core.plan import I32, I64, StepPlan

from vllmx_metal.paged import DecodeRows, decode_rows

TILE_TOKENS = 256
"""Query tokens of one row that are attended together; bounds the scores where they are made."""
BATCH_KEYS = 1 << 16
"""Keys that one batch gathers, padding included, unless a single tile has more."""
PADDING = 1.25
"""A batch gathers at most so many times the keys that its tiles have, beside SLACK of each."""
SLACK = 64


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """N tiles of Q query tokens each, over C keys each."""

    tiles: int
    queries: int
    slots: mx.array | None = None  # (N * C,) KV slots
    mask: mx.array | str | None = None
    """(N, 1, Q, C) True where the query sees the key; "causal": the last query sees all, each one
    before it one key less; None: every query sees every key."""
    rows: DecodeRows | None = None
    """For the kernel that reads the pages where they lie; there are no slots and no mask then."""

    @property
    def tokens(self) -> int:
        return self.tiles * self.queries


@dataclass(frozen=True, slots=True)
class Batches:
    """Every query token of a step once."""

    batches: tuple[AttentionBatch, ...]
    order: mx.array | None  # (T,) the step's tokens in the order of the batches; None: as they are
    inverse: mx.array | None  # (T,)


@dataclass(frozen=True, slots=True)
class MetalStep:
    """`vllmx_core.model.StepInputs` as MLX arrays, and the rest of the plan on the host."""

    plan: StepPlan
    block_size: int
    paged: bool
    """Rows of one token are attended by the kernel of `vllmx_metal.paged`."""
    tokens: mx.array  # (T,)
    positions: mx.array  # (T,)
    slots: mx.array  # (T,)
    logit_rows: mx.array  # (L,)
    _batches: dict[tuple[int | None, bool], Batches] = field(default_factory=dict)
    _rotations: dict[int, mx.array] = field(default_factory=dict)

    @classmethod
    def build(
        cls, plan: StepPlan, block_size: int, last_ids: mx.array, *, paged: bool
    ) -> MetalStep:
        """References to `last_ids`, of the step before, stay on the device: they may still be
        computed."""
        tokens = mx.array(plan.tokens)
        if (plan.tokens < 0).any():
            referred = mx.maximum(last_ids[mx.maximum(-tokens - 1, 0)], 0)  # (T,)
            tokens = mx.where(tokens < 0, referred, tokens)
        return cls(
            plan, block_size, paged, tokens, mx.array(plan.positions), mx.array(plan.slots),
            mx.array(plan.logit_rows),
        )  # fmt: skip

    def rotation(self, table: mx.array) -> mx.array:
        """(T, 1, rotary_dim) the table's rows for the step's tokens; made for the first layer."""
        if id(table) not in self._rotations:
            self._rotations[id(table)] = table[self.positions][:, None]
        return self._rotations[id(table)]

    def batches(self, window: int | None, causal: bool) -> Batches:
        """Every query token of the step once; made for the first layer that asks."""
        key = (window, causal)
        if key not in self._batches:
            tiles = _tiles(self.plan, window, causal)
            paged = self.paged and causal
            groups = [tiles.take(chosen) for chosen in tiles.groups(single_together=paged)]
            order = np.concatenate([group.tokens().ravel() for group in groups])
            in_order = np.array_equal(order, np.arange(len(order)))
            self._batches[key] = Batches(
                tuple(self._batch(group, window, causal) for group in groups),
                None if in_order else mx.array(order.astype(np.int32)),
                None if in_order else mx.array(np.argsort(order).astype(np.int32)),
            )
        return self._batches[key]

    def _batch(self, tiles: _Tiles, window: int | None, causal: bool) -> AttentionBatch:
        if self.paged and causal and tiles.queries[0] == 1:
            table = self.plan.block_table[tiles.row]
            rows = decode_rows(table, tiles.first_key, tiles.last_key, self.block_size)
            return AttentionBatch(len(tiles.row), 1, rows=rows)
        longest = int((tiles.last_key - tiles.first_key).max()) + 1
        keys = tiles.first_key[:, None] + np.arange(longest)  # (N, C) positions
        # Padding repeats the tile's last key, so that no other row's NaN comes in.
        held = np.minimum(keys, tiles.last_key[:, None])
        blocks = self.plan.block_table[tiles.row[:, None], held // self.block_size]
        slots = blocks * self.block_size + held % self.block_size
        behind = self.plan.positions[tiles.tokens()][:, :, None] - keys[:, None, :]  # (N, Q, C)
        mask = np.broadcast_to((keys <= tiles.last_key[:, None])[:, None, :], behind.shape)
        if causal:
            mask = mask & (behind >= 0)
        if window is not None:
            mask = mask & (np.abs(behind) < window)
        return AttentionBatch(
            len(tiles.row), int(tiles.queries[0]), mx.array(slots.ravel().astype(np.int32)),
            _shortest(mask),
        )  # fmt: skip


def _shortest(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> mx.array | str | None:
    """The mask (N, Q, C) as `AttentionBatch` has it."""
    if mask.all():
        return None
    queries, keys = mask.shape[1:]
    if keys >= queries and (mask == np.tri(queries, keys, keys - queries, dtype=bool)).all():
        return "causal"
    return mx.array(mask[:, None])


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Pieces of rows, at most TILE_TOKENS queries each; every array is (tiles,)."""

    row: I64
    first_token: I64
    queries: I64
    first_key: I64
    last_key: I64

    def take(self, chosen: I64) -> _Tiles:
        return _Tiles(
            self.row[chosen], self.first_token[chosen], self.queries[chosen],
            self.first_key[chosen], self.last_key[chosen],
        )  # fmt: skip

    def tokens(self) -> I64:
        """(tiles, Q) indices into the T tokens, where all tiles have as many queries."""
        found: I64 = self.first_token[:, None] + np.arange(int(self.queries[0]))
        return found

    def groups(self, *, single_together: bool) -> list[I64]:
        """Tiles of as many queries and about as many keys: what a batch gathers stays below
        BATCH_KEYS and near to what its tiles have. `single_together`: all tiles of one query are a
        group, for they are not gathered."""
        lengths = self.last_key - self.first_key + 1
        order = np.lexsort((lengths, self.queries))
        groups: list[I64] = []
        start, keys = 0, 0
        for end, tile in enumerate(order):
            width, length = end + 1 - start, int(lengths[tile])
            same = self.queries[tile] == self.queries[order[start]]
            allowed = min(BATCH_KEYS, PADDING * (keys + length) + SLACK * width)
            free = single_together and self.queries[tile] == 1
            if end > start and not (same and (free or width * length <= allowed)):
                groups.append(np.sort(order[start:end]))
                start, keys = end, 0
            keys += length
        groups.append(np.sort(order[start:]))
        return groups


def _tiles(plan: StepPlan, window: int | None, causal: bool) -> _Tiles:
    start = plan.query_start.astype(np.int64)
    counts = -(-np.diff(start) // TILE_TOKENS)  # (R,) tiles of each row
    row = np.repeat(np.arange(plan.num_rows), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_token = start[row] + index * TILE_TOKENS
    queries = np.minimum(TILE_TOKENS, start[row + 1] - first_token)
    first_key = np.zeros(len(row), np.int64)
    if window is not None:
        first_key = np.maximum(0, plan.positions[first_token].astype(np.int64) - window + 1)
    last_key = plan.context_len[row].astype(np.int64) - 1
    if causal:
        last_key = plan.positions[first_token + queries - 1].astype(np.int64)
    return _Tiles(row, first_token, queries, first_key, last_key)


def detached(plan: StepPlan) -> StepPlan:
    """A copy that the engine's next step does not overwrite."""

    def copy(array: I32) -> I32:
        return np.array(array, np.int32, order="C")

    return StepPlan(
        copy(plan.tokens), copy(plan.positions), copy(plan.slots), copy(plan.query_start),
        copy(plan.context_len), copy(plan.block_table), copy(plan.logit_rows),
    )  # fmt: skip
