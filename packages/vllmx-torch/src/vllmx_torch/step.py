"""One step's plan on the device, and how its attention is cut into batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllmx_core.plan import I64, StepPlan

from vllmx_torch.transfer import upload

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


@dataclass(frozen=True, slots=True)
class TorchStep:
    """`vllmx_core.model.StepInputs` as tensors, and the rest of the plan. `plan` itself may be read
    until `LoadedModel.step` returns, which is as long as this lives."""

    plan: StepPlan
    block_size: int
    tokens: Tensor  # (T,)
    positions: Tensor  # (T,)
    slots: Tensor  # (T,)
    block_table: Tensor  # (R, B)
    logit_rows: Tensor  # (L,)
    _batches: dict[tuple[int | None, bool], list[AttentionBatch]] = field(default_factory=dict)

    @classmethod
    def upload(
        cls, plan: StepPlan, block_size: int, last_ids: Tensor, device: torch.device
    ) -> TorchStep:
        """The plan on the device, references to `last_ids` (of the step before) resolved there."""
        tokens, positions, slots, table, rows = (
            upload(array, np.int64, device)
            for array in (
                plan.tokens, plan.positions, plan.slots, plan.block_table, plan.logit_rows
            )
        )  # fmt: skip
        if (plan.tokens < 0).any():
            referred = last_ids[(-tokens - 1).clamp(min=0)].clamp(min=0)  # (T,)
            tokens = torch.where(tokens < 0, referred, tokens)
        return cls(plan, block_size, tokens, positions, slots, table, rows)

    def batches(self, window: int | None, causal: bool) -> list[AttentionBatch]:
        """Every query token of the step once; made for the first layer that asks."""
        key = (window, causal)
        if key not in self._batches:
            tiles = _tiles(self.plan, window, causal)
            self._batches[key] = [
                self._batch(tiles.take(chosen), window, causal) for chosen in tiles.groups()
            ]
        return self._batches[key]

    def _batch(self, tiles: _Tiles, window: int | None, causal: bool) -> AttentionBatch:
        device, queries = self.tokens.device, int(tiles.queries[0])
        longest = int((tiles.last_key - tiles.first_key).max()) + 1
        packed = np.stack([tiles.row, tiles.first_token, tiles.first_key, tiles.last_key])
        row, first_token, first_key, last_key = upload(packed, np.int64, device)[:, :, None]
        tokens = first_token + torch.arange(queries, device=device)  # (N, Q)
        keys = first_key + torch.arange(longest, device=device)  # (N, C) positions
        # Padding repeats the tile's last key, so that no other row's NaN comes in.
        held = torch.minimum(keys, last_key)
        blocks = self.block_table[row, held // self.block_size]
        slots = blocks * self.block_size + held % self.block_size
        behind = self.positions[tokens][:, :, None] - keys[:, None, :]  # (N, Q, C)
        mask = (keys <= last_key)[:, None, :].expand_as(behind)
        if causal:
            mask = mask & (behind >= 0)
        if window is not None:
            mask = mask & (behind.abs() < window)
        return AttentionBatch(tokens.flatten(), slots, mask)


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

    def groups(self) -> list[I64]:
        """Tiles of as many queries and about as many keys, padded to no more than BATCH_KEYS."""
        lengths = self.last_key - self.first_key + 1
        groups: list[I64] = []
        start, order = 0, np.lexsort((lengths, self.queries))
        for end in range(1, len(order) + 1):
            if end < len(order):
                following = order[end]
                padded = (end + 1 - start) * lengths[following]
                same = self.queries[following] == self.queries[order[start]]
                if same and padded <= BATCH_KEYS:
                    continue
            groups.append(order[start:end])
            start = end
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
