"""Sparse attention in plain torch: the indexer's picks, and latent attention to them alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllmx_core.ops.compress import entry_slots, rotate_last
from vllmx_core.ops.indexer import Indexer, pick_by_rows, rotated

from vllmx_torch.arrays import TORCH
from vllmx_torch.frame import TorchFrame
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.step import AttentionBatch, TorchStep
from vllmx_torch.transfer import upload

_GATHERED = 1 << 15
"""Picked rows that one batch gathers, unless a single token has more."""


def pick_tokens(op: Indexer, frame: TorchFrame) -> Tensor:
    """(T, K); see `Indexer`."""
    spec, step, pages = op.spec, frame.step, frame.pages[op.spec.layer]
    table = frame.vector(op.rope)[step.positions]  # (T, Dr)
    if op.key is None:
        q = rotate_last(frame[op.q].view(-1, spec.num_heads, spec.head_size), table, TORCH)
    else:
        q, keys = rotated(frame[op.q], frame[op.key], table, spec, TORCH)
        pages.v.write(step.slots[pages.group], keys[:, None])

    def keys_of(row: int) -> Tensor:
        known = torch.arange(int(step.plan.context_len[row]) // spec.ratio, device=q.device)
        blocks = step.block_tables[pages.group]
        slots = entry_slots(blocks, row, known, step.block_size, spec.ratio)
        return frame.scratch.gather("v", pages.v, slots[None])[0, 0]  # (N, D)

    weights, positions = frame[op.head_weights], step.positions
    found: Tensor = pick_by_rows(q, weights, positions, step.plan, spec, keys_of, TORCH)
    return found


def picked_batches(step: TorchStep, pages: LayerPages, picked: Tensor) -> list[AttentionBatch]:
    """Every query token of the step once, as a tile over what it picked (T, K)."""
    counts = np.diff(step.plan.query_start)
    rows = upload(np.repeat(np.arange(len(counts)), counts), np.int64, picked.device)
    picked = picked[:, : int(step.plan.context_len.max())]
    mask = picked >= 0
    # Padding repeats a pick, so that no other token's NaN comes in.
    held = torch.where(mask, picked, picked[:, :1])
    slots = entry_slots(step.block_tables[pages.group], rows[:, None], held, step.block_size, 1)
    together = max(1, _GATHERED // picked.shape[1])
    tokens = torch.arange(len(rows), device=picked.device)
    return [
        AttentionBatch(*parts)
        for parts in zip(
            tokens.split(together),
            slots.split(together),
            mask[:, None].split(together),
            strict=True,
        )
    ]
