"""Masks, edits and penalties on logits, as `vllmx_core.reference.sampler` defines them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from vllmx_core.plan import F32, I32, U32, LogitEdits, SamplingRows, TokenCounts


def edited_logits(logits: mx.array, rows: SamplingRows, fed_tokens: mx.array) -> mx.array:
    """(L, V) logits after mask, edits and penalties. fed_tokens: (L,) the id that each row feeds
    at its logit row."""
    out = logits
    if rows.masks is not None and rows.mask_index is not None:
        out = mx.where(_allowed(rows.masks, rows.mask_index, logits.shape[1]), out, -mx.inf)
    if rows.edits is not None and len(rows.edits.ids):
        out = _edit(out, rows.edits)
    if rows.counts is not None:
        out = _penalise(out, rows, rows.counts, fed_tokens)
    return out


def _allowed(masks: U32, index: I32, vocab_size: int) -> mx.array:
    """(L, V) bits of each row's mask; rows without one are all True."""
    words = mx.array(masks)[:, :, None]  # (N, W, 1)
    bits = (words >> mx.arange(32, dtype=mx.uint32)) & mx.array(1, mx.uint32)
    allowed = bits.reshape(len(masks), -1)[:, :vocab_size] > 0  # (N, V)
    return allowed[mx.array(np.maximum(index, 0))] | mx.array(index < 0)[:, None]


def _edit(logits: mx.array, edits: LogitEdits) -> mx.array:
    return logits.at[_row_of_each_entry(edits.start), mx.array(edits.ids)].add(
        mx.array(edits.values)
    )


def _penalise(
    logits: mx.array, rows: SamplingRows, counts: TokenCounts, fed_tokens: mx.array
) -> mx.array:
    """Pending tokens come as entries of their own behind the listed ones. Where one is listed as
    well, both entries get the whole count, so it does not matter which of them is written last."""
    waiting = mx.array(np.flatnonzero(counts.pending).astype(np.int32))
    listed = mx.array(counts.output_counts)
    row = mx.concatenate([_row_of_each_entry(counts.start), waiting])  # (N,)
    fed = fed_tokens[row]
    ids = mx.concatenate([mx.array(counts.ids), fed[len(listed) :]])
    is_pending = mx.array(counts.pending)[row] & (ids == fed)
    known = mx.concatenate([listed, mx.zeros(len(waiting), mx.int32)])
    fed_count = mx.zeros(fed_tokens.shape, mx.int32).at[row].add(known * is_pending)  # (L,)
    count = mx.where(is_pending, fed_count[row] + 1, known).astype(mx.float32)

    def column(values: F32) -> mx.array:
        return mx.array(values)[row]

    factor, value = column(rows.repetition_penalty), logits[row, ids]
    value = mx.where(value > 0, value / factor, value * factor)
    value = value - column(rows.frequency_penalty) * count
    value = value - column(rows.presence_penalty) * (count > 0)
    place = row.astype(mx.int64) * logits.shape[1] + ids
    return mx.put_along_axis(logits.reshape(-1), place, value, axis=0).reshape(logits.shape)


def _row_of_each_entry(start: I32) -> mx.array:
    """(N,) from (L + 1,)."""
    return mx.array(np.repeat(np.arange(len(start) - 1, dtype=np.int32), np.diff(start)))
