"""Masks, edits and penalties on logits, as `vllmx_core.reference.sampler` defines them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllmx_core.plan import I32, I64, LogitEdits, SamplingRows, TokenCounts

from vllmx_torch.transfer import upload


def edited_logits(logits: Tensor, rows: SamplingRows, fed_tokens: Tensor) -> Tensor:
    """(L, V) logits after mask, edits and penalties; `logits` stays as it is. fed_tokens: (L,) the
    id that each row feeds at its logit row."""
    out = logits
    if rows.masks is not None and rows.mask_index is not None:
        out = out.masked_fill(~_allowed(rows.masks, rows.mask_index, logits), -torch.inf)
    if rows.edits is not None and len(rows.edits.ids):
        out = _edit(out, rows.edits)
    if rows.counts is not None:
        out = _penalise(out, rows, rows.counts, fed_tokens)
    return out


def _allowed(
    masks: np.ndarray[tuple[int, ...], np.dtype[np.uint32]], index: I32, logits: Tensor
) -> Tensor:
    """(L, V) bits of each row's mask; rows without one are all True."""
    device, vocab_size = logits.device, logits.shape[1]
    words = upload(masks.view(np.int32), np.int32, device)  # (N, W)
    bits = (words[:, :, None] >> torch.arange(32, device=device)) & 1
    allowed = bits.flatten(1)[:, :vocab_size].bool()  # (N, V)
    chosen = upload(index, np.int64, device)
    return allowed[chosen.clamp(min=0)] | (chosen < 0)[:, None]


def _edit(logits: Tensor, edits: LogitEdits) -> Tensor:
    row = upload(_row_of_each_entry(edits.start), np.int64, logits.device)
    ids = upload(edits.ids, np.int64, logits.device)
    changed = logits[row, ids] + upload(edits.values, np.float32, logits.device)
    return logits.index_put((row, ids), changed)


def _penalise(
    logits: Tensor, rows: SamplingRows, counts: TokenCounts, fed_tokens: Tensor
) -> Tensor:
    """Pending tokens come as entries of their own behind the listed ones. Where one is listed as
    well, both entries get the whole count, so it does not matter which of them is written last."""
    device = logits.device
    listed_row = _row_of_each_entry(counts.start)
    waiting = np.flatnonzero(counts.pending)
    row = upload(np.concatenate([listed_row, waiting]), np.int64, device)  # (N,)
    fed = fed_tokens[row]
    listed_ids = upload(counts.ids, np.int64, device)
    ids = torch.cat([listed_ids, fed[len(listed_row) :]])
    listed = upload(counts.output_counts, np.int64, device)
    is_pending = upload(counts.pending, np.bool_, device)[row] & (ids == fed)
    known = torch.cat([listed, listed.new_zeros(len(waiting))])
    fed_count = torch.zeros_like(fed_tokens).index_add(0, row, known * is_pending)  # (L,)
    count = torch.where(is_pending, fed_count[row] + 1, known).float()

    def column(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
        return upload(values, np.float32, device)[row]

    factor, value = column(rows.repetition_penalty), logits[row, ids]
    value = torch.where(value > 0, value / factor, value * factor)
    value = value - column(rows.frequency_penalty) * count
    value = value - column(rows.presence_penalty) * (count > 0)
    return logits.index_put((row, ids), value)


def _row_of_each_entry(start: I32) -> I64:
    """(N,) from (L + 1,)."""
    return np.repeat(np.arange(len(start) - 1, dtype=np.int64), np.diff(start))
