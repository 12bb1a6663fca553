"""One step's plan on the device, and how its attention is cut into batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllmx_core.ops.attention import first_seen
from vllmx_core.plan import StepPlan
from vllmx_core.query_tiles import QueryTiles

from vllmx_torch.transfer import upload

_NOTHING = np.zeros((0, 0), np.int32)
TILE_TOKENS = 128
"""Query tokens of one row that are attended together; bounds the scores."""
BATCH_KEYS = 1 << 16
"""Keys that one batch gathers, padding included, unless a single tile has more."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """N tiles of Q query tokens each, over C keys each."""

    tokens: Tensor  # (N * Q,) indices into the T tokens
    slots: Tensor  # (N, C) KV slots
    mask: Tensor  # (N, Q, C) True where the query sees the key
    keys: Tensor | None = None  # (N, C) positions; None where no bias is added by distance


@dataclass(frozen=True, slots=True)
class TorchStep:
    """A step's plan as tensors. `plan` itself may be read until `LoadedModel.step` returns, which
    is as long as this lives."""

    plan: StepPlan
    block_size: int
    tokens: Tensor  # (T,)
    positions: Tensor  # (T,)
    slots: Tensor  # (G, T)
    block_tables: Tensor  # (G, R, B)
    logit_rows: Tensor  # (L,)
    token_types: Tensor  # (T,)
    _batches: dict[tuple[int, int | None, bool, bool], list[AttentionBatch]] = field(
        default_factory=dict
    )

    @classmethod
    def upload(
        cls, plan: StepPlan, block_size: int, last_ids: Tensor, device: torch.device
    ) -> TorchStep:
        """The plan on the device, references to `last_ids` (of the step before) resolved there."""
        types = np.zeros_like(plan.tokens) if plan.token_types is None else plan.token_types
        tokens, positions, slots, tables, rows, token_types = (
            upload(array, np.int64, device)
            for array in (
                plan.tokens,
                plan.positions,
                np.stack(plan.slots) if plan.slots else _NOTHING,
                np.stack(plan.block_tables) if plan.block_tables else _NOTHING,
                plan.logit_rows,
                types,
            )
        )
        if (plan.tokens < 0).any():
            referred = last_ids[(-tokens - 1).clamp(min=0)].clamp(min=0)  # (T,)
            tokens = torch.where(tokens < 0, referred, tokens)
        return cls(plan, block_size, tokens, positions, slots, tables, rows, token_types)

    def rotations(self, table: Tensor, axes: tuple[int, ...]) -> Tensor:
        """(T, rotary_dim): cos, then sin, of each token; see `AttentionSpec.rope_axes`."""
        turned = self.plan.rope_positions
        if not axes or turned is None:
            return table[self.positions]
        at = upload(turned[list(axes)].T, np.int64, table.device)  # (T, rotary_dim / 2)
        column = torch.arange(len(axes), device=table.device)
        return torch.cat([table[at, column], table[at, len(axes) + column]], dim=1)

    def batches(
        self, group: int, reach: int, causal: bool, *, spans: bool = False
    ) -> list[AttentionBatch]:
        """Every query token of the step once, over the pages of a cache group; made for the first
        layer that asks. `reach`: see `AttentionSpec.reach`. `spans`: tokens see up to
        `StepPlan.visible_to`."""
        spans = spans and self.plan.visible_to is not None
        key = (group, reach, causal, spans)
        if key not in self._batches:
            tiles = QueryTiles.cut(self.plan, reach, causal, TILE_TOKENS, spans=spans)
            seen = self.positions
            if spans and self.plan.visible_to is not None:
                seen = upload(self.plan.visible_to, np.int64, seen.device)
            self._batches[key] = [
                self._batch(found, group, reach, seen if causal else None)
                for found in tiles.groups(BATCH_KEYS)
            ]
        return self._batches[key]

    def _batch(
        self, tiles: QueryTiles, group: int, reach: int, seen: Tensor | None
    ) -> AttentionBatch:
        """`seen` (T,): the last position that each token sees; None: they see both ways."""
        device, queries = self.tokens.device, int(tiles.queries[0])
        packed = np.stack([tiles.row, tiles.first_token, tiles.first_key, tiles.last_key])
        row, first_token, first_key, last_key = upload(packed, np.int64, device)[:, :, None]
        tokens = first_token + torch.arange(queries, device=device)  # (N, Q)
        keys = first_key + torch.arange(tiles.longest, device=device)  # (N, C) positions
        # Padding repeats the tile's last key, so that no other row's NaN comes in.
        held = torch.minimum(keys, last_key)
        blocks = self.block_tables[group, row, held // self.block_size]
        slots = blocks * self.block_size + held % self.block_size
        keys = keys[:, None, :]
        places = self.positions[tokens][:, :, None]  # (N, Q, 1) positions
        mask = (keys <= last_key[:, None, :]) & (keys >= first_seen(places, reach))  # (N, Q, C)
        if seen is not None:
            mask = mask & (keys <= seen[tokens][:, :, None])
        elif reach:
            mask = mask & (keys < places + reach)
        return AttentionBatch(tokens.flatten(), slots, mask, held)
