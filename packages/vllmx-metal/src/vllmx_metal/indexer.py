"""Sparse attention in MLX's own ops: the indexer's picks, and tiles of what tokens picked."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from vllmx_core.ops.compress import entry_slots, rotate_last
from vllmx_core.ops.indexer import Indexer, pick_by_rows, rotated

from vllmx_metal.arrays import METAL
from vllmx_metal.frame import MetalFrame
from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.step import AttentionBatch, Batches, GatheredTiles, MetalStep

_GATHERED = 1 << 15
"""Picked rows that one batch gathers, unless a single token has more."""


def pick_tokens(op: Indexer, frame: MetalFrame) -> mx.array:
    """(T, K); see `Indexer`."""
    spec, step, pages = op.spec, frame.step, frame.pages[op.spec.layer]
    table = frame.vector(op.rope)[step.positions]  # (T, Dr)
    q = METAL.wide(frame[op.q])
    if op.key is None:
        q = rotate_last(q.reshape(-1, spec.num_heads, spec.head_size), table, METAL)
    else:
        q, keys = rotated(q, METAL.wide(frame[op.key]), table, spec, METAL)
        pages.v.write(step.slots[pages.group], keys[:, None])

    def keys_of(row: int) -> mx.array:
        known = np.arange(int(step.plan.context_len[row]) // spec.ratio)
        blocks = step.plan.block_tables[pages.group]
        slots = entry_slots(blocks, row, known, step.block_size, spec.ratio)
        return METAL.wide(pages.v.gather(mx.array(slots.astype(np.int32)))[:, 0])  # (N, D)

    weights, positions = METAL.wide(frame[op.head_weights]), step.positions
    found: mx.array = pick_by_rows(q, weights, positions, step.plan, spec, keys_of, METAL)
    return found


def picked_batches(step: MetalStep, pages: LayerPages, picked: mx.array) -> Batches:
    """Every query token of the step once, as a tile over what it picked (T, K)."""
    rows = np.repeat(np.arange(step.plan.num_rows), np.diff(step.plan.query_start))
    width = min(picked.shape[1], int(step.plan.context_len.max()))
    picked = picked[:, :width]
    mask = picked >= 0
    # Padding repeats a pick, so that no other token's NaN comes in.
    held = mx.where(mask, picked, picked[:, :1])
    table = mx.array(np.ascontiguousarray(step.plan.block_tables[pages.group]))
    slots = entry_slots(table, mx.array(rows.astype(np.int32))[:, None], held, step.block_size, 1)
    together = max(1, _GATHERED // width)
    batches = []
    for first in range(0, len(rows), together):
        last = min(first + together, len(rows))
        seen = mask[first:last, None, None]
        tiles = GatheredTiles(last - first, 1, slots[first:last].reshape(-1), seen)
        batches.append(AttentionBatch(last - first, tiles))
    return Batches(tuple(batches), None, None)
