"""One step's plan as MLX arrays, and how its attention is cut into batches."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
from vllmx_core.ops.attention import AttentionSpec, first_seen
from vllmx_core.plan import I32, PatchRows, StepPlan
from vllmx_core.query_tiles import QueryTiles

from vllmx_metal.kernel_choice import OwnKernels
from vllmx_metal.paged import DecodeRows, decode_rows
from vllmx_metal.paged_prefill import PrefillTiles, prefill_fits

TILE_TOKENS = 256
"""Query tokens of one row that are attended together; bounds the scores where they are made."""
BATCH_KEYS = 1 << 16
"""Keys that one batch gathers, padding included, unless a single tile has more."""
PADDING = 1.25
"""A batch gathers at most so many times the keys that its tiles have, and SLACK for each."""
SLACK = 64


@dataclass(frozen=True, slots=True)
class GatheredTiles:
    """N tiles of Q query tokens each, over C keys each."""

    tiles: int
    queries: int
    slots: mx.array  # (N * C,) KV slots
    mask: mx.array | str | None
    """(N, 1, Q, C) True where the query sees the key; "causal": the last query sees all, each one
    before it one key less; None: every query sees every key."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Tokens that are attended together: over gathered keys, or by a kernel that reads the pages
    where they lie."""

    tokens: int
    over: GatheredTiles | DecodeRows | PrefillTiles


@dataclass(frozen=True, slots=True)
class Batches:
    """Every query token of a step once."""

    batches: tuple[AttentionBatch, ...]
    order: mx.array | None  # (T,) the step's tokens in the order of the batches; None: as they are
    inverse: mx.array | None  # (T,)


@dataclass(frozen=True, slots=True)
class MetalStep:
    """A step's plan as MLX arrays, and the rest of it on the host."""

    plan: StepPlan
    block_size: int
    kernels: OwnKernels
    tokens: mx.array  # (T,)
    positions: mx.array  # (T,)
    slots: tuple[mx.array, ...]  # (T,) of each cache group
    logit_rows: mx.array  # (L,)
    token_types: mx.array  # (T,)
    _batches: dict[tuple[int, int | None, bool, bool, OwnKernels], Batches] = field(
        default_factory=dict
    )
    _rotations: dict[tuple[int, tuple[int, ...]], tuple[mx.array, mx.array]] = field(
        default_factory=dict
    )

    @classmethod
    def build(
        cls, plan: StepPlan, block_size: int, last_ids: mx.array, kernels: OwnKernels
    ) -> MetalStep:
        """References to `last_ids`, of the step before, stay on the device: they may still be
        computed."""
        tokens = mx.array(plan.tokens)
        if (plan.tokens < 0).any():
            referred = mx.maximum(last_ids[mx.maximum(-tokens - 1, 0)], 0)  # (T,)
            tokens = mx.where(tokens < 0, referred, tokens)
        types = np.zeros_like(plan.tokens) if plan.token_types is None else plan.token_types
        return cls(
            plan,
            block_size,
            kernels,
            tokens,
            mx.array(plan.positions),
            tuple(mx.array(slots) for slots in plan.slots),
            mx.array(plan.logit_rows),
            mx.array(types),
        )

    def rotation(self, table: mx.array, axes: tuple[int, ...] = ()) -> tuple[mx.array, mx.array]:
        """Cosines and sines (T, 1, rotary_dim / 2) of the step's tokens, by the axes of
        `AttentionSpec.rope_axes`; made for the first layer."""
        key = id(table), axes
        if key not in self._rotations:
            cos, sin = mx.split(self._turned(table, axes)[:, None], 2, axis=-1)
            self._rotations[key] = cos, sin
        return self._rotations[key]

    def _turned(self, table: mx.array, axes: tuple[int, ...]) -> mx.array:
        """(T, rotary_dim) cosines and sines of these tokens."""
        turned = self.plan.rope_positions
        if not axes or turned is None:
            return table[self.positions]
        at = mx.array(np.ascontiguousarray(turned[list(axes)].T))  # (T, rotary_dim / 2)
        column = mx.arange(len(axes))
        return mx.concatenate([table[at, column], table[at, len(axes) + column]], axis=1)

    def batches(self, spec: AttentionSpec, group: int, *, gathered: bool = False) -> Batches:
        """Every query token of the step once, over the pages of a cache group; made for the first
        layer of its kind that asks. `gathered`: no kernel reads the pages where they lie."""
        kernels = OwnKernels() if gathered else self.kernels
        kernels = replace(kernels, prefill=kernels.prefill and prefill_fits(spec))
        key = (group, spec.reach, spec.causal, spec.spans, kernels)
        if key not in self._batches:
            self._batches[key] = self._cut(spec, self.plan.block_tables[group], kernels)
        return self._batches[key]

    def _cut(self, spec: AttentionSpec, table: I32, kernels: OwnKernels) -> Batches:
        tiles = QueryTiles.cut(self.plan, spec.reach, spec.causal, TILE_TOKENS, spans=spec.spans)
        single = tiles.queries == 1
        ahead = np.maximum.reduceat(self._seen(spec) - self.plan.positions, tiles.first_token)
        prefill = kernels.prefill & (ahead == 0)  # the kernel has no place for spans
        paged = spec.causal & np.where(single, kernels.decode, prefill)  # (tiles,)
        groups, batches = [], []
        for chosen, made in ((paged & single, self._rows), (paged & ~single, self._prefill)):
            if chosen.any():
                groups.append(tiles.take(np.flatnonzero(chosen)))
                batches.append(AttentionBatch(len(groups[-1].tokens()), made(groups[-1], table)))
        rest = tiles.take(np.flatnonzero(~paged))
        for group in rest.groups(BATCH_KEYS, padding=PADDING, slack=SLACK):
            groups.append(group)
            over = self._gathered(group, table, spec)
            batches.append(AttentionBatch(len(group.tokens()), over))
        order = np.concatenate([group.tokens() for group in groups])
        in_order = np.array_equal(order, np.arange(len(order)))
        return Batches(
            tuple(batches),
            None if in_order else mx.array(order.astype(np.int32)),
            None if in_order else mx.array(np.argsort(order).astype(np.int32)),
        )

    def _seen(self, spec: AttentionSpec) -> I32:
        """(T,) the last position that each token of a causal layer sees."""
        seen = self.plan.visible_to if spec.spans else None
        return self.plan.positions if seen is None else seen

    def _rows(self, tiles: QueryTiles, table: I32) -> DecodeRows:
        return decode_rows(table[tiles.row], tiles.first_key, tiles.last_key, self.block_size)

    def _prefill(self, tiles: QueryTiles, table: I32) -> PrefillTiles:
        return PrefillTiles.of(
            table[tiles.row],
            self.plan.positions[tiles.first_token],
            tiles.queries,
            self.block_size,
        )

    def _gathered(self, tiles: QueryTiles, table: I32, spec: AttentionSpec) -> GatheredTiles:
        keys = tiles.first_key[:, None] + np.arange(tiles.longest)  # (N, C) positions
        # Padding repeats the tile's last key, so that no other row's NaN comes in.
        held = np.minimum(keys, tiles.last_key[:, None])
        blocks = table[tiles.row[:, None], held // self.block_size]
        slots = blocks * self.block_size + held % self.block_size
        tokens = tiles.tokens().reshape(len(tiles), -1)  # (N, Q)
        queries = self.plan.positions[tokens]  # (N, Q) positions
        keys, queries = keys[:, None, :], queries[:, :, None]
        mask = (keys <= tiles.last_key[:, None, None]) & (keys >= first_seen(queries, spec.reach))
        if spec.causal:
            mask = mask & (keys <= self._seen(spec)[tokens][:, :, None])
        elif spec.window is not None:
            mask = mask & (keys < queries + spec.window)
        return GatheredTiles(
            len(tiles), tokens.shape[1], mx.array(slots.ravel().astype(np.int32)), _shortest(mask)
        )


def _shortest(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> mx.array | str | None:
    """The mask (N, Q, C) as `AttentionBatch` has it."""
    if mask.all():
        return None
    queries, keys = mask.shape[1:]
    if keys >= queries and (mask == np.tri(queries, keys, keys - queries, dtype=bool)).all():
        return "causal"
    return mx.array(mask[:, None])


def detached(plan: StepPlan) -> StepPlan:
    """A copy that the engine's next step does not overwrite."""
    return StepPlan(**{part.name: _copied(getattr(plan, part.name)) for part in fields(plan)})


def _copied(value: Any) -> Any:
    """Copies of arrays, of tuples of them, and of what a tower is given."""
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if isinstance(value, PatchRows):
        return PatchRows(*(_copied(getattr(value, part.name)) for part in fields(value)))
    return None if value is None else np.array(value, order="C")
