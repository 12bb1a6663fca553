"""Compressed attention (DeepSeek-V4) over any `Arrays`, for backends that interpret ops.

Rows of states are in the order of `StateRows`. The state of a window of rows holds the last rows of
the sequence, the newest last, as that of a convolution does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vllmx_core.arrays import Array, Arrays
from vllmx_core.cache.state_rows import Index, StateRows
from vllmx_core.ops.compress import Compress, entry_slots, rotate_last
from vllmx_core.ops.compressed_attention import CompressedAttention
from vllmx_core.ops.values import ArrayFrame
from vllmx_core.plan import StepPlan
from vllmx_core.records import Record

_GATHERED = 1 << 15
"""Rows that are gathered together, unless a single token sees more."""


class WindowParts(Record):
    """The step's tokens in N parts, which end where a window, a row or a token whose states are
    kept does. Each part begins where its window does, or its row."""

    begin: Index  # (N,) tokens
    end: Index  # (N,) last tokens
    row: Index  # (N,) in the order of `StateRows`
    fresh: Index  # (N,) True where the part has its window's first token
    ended: Index  # (n,) parts at the end of a window
    left: Index  # (R + M,) parts behind which states are kept: those of rows, then of `keeping`

    @classmethod
    def of(cls, plan: StepPlan, rows: StateRows, ratio: int) -> WindowParts:
        last, in_window = rows.first + rows.lengths - 1, plan.positions % ratio
        closed = np.flatnonzero(in_window == ratio - 1)
        end = np.unique(np.concatenate([closed, last, rows.keeping]))
        row = np.repeat(np.argsort(rows.first), np.diff(plan.query_start))[end]
        start = end - in_window[end]
        begin = np.maximum(start, rows.first[row])
        left = np.searchsorted(end, np.concatenate([last, rows.keeping]))
        return cls(begin, end, row, begin == start, np.searchsorted(end, closed), left)


def compress(
    op: Compress,
    frame: ArrayFrame[Any],
    rows: StateRows,
    before: Array,
    group: int,
    block_size: int,
) -> tuple[Array, Array, Array]:
    """The states (R + M, S, 3, D) of `WindowParts.left`, after those (R, S, 3, D) `before`, and the
    entries (n, 1, D) of windows that end, with the slots (n,) that they go to."""
    xp, plan, spec, kv_gate = frame.xp, frame.plan, op.spec, frame[op.kv_gate]
    parts = WindowParts.of(plan, rows, spec.ratio)
    series, count = spec.series, len(before) * spec.series
    longest = int((parts.end - parts.begin).max()) + 1
    places = parts.begin[:, None] + np.arange(longest)  # (N, W)
    tokens = np.minimum(places, parts.end[:, None])
    held = xp.upload(kv_gate, places <= parts.end[:, None])[..., None, None]
    split = xp.wide(kv_gate[xp.upload(kv_gate, tokens)])
    split = split.reshape(*tokens.shape, 2, series, spec.size)
    added = frame.vector(op.bias).reshape(spec.ratio, series, spec.size)
    added = added[xp.upload(kv_gate, plan.positions[tokens] % spec.ratio)]
    gate = xp.where(held, split[:, :, 1] + added, -xp.inf)  # (N, W, S, D)
    top = xp.max(gate, axis=1, keepdims=True)
    weights = xp.exp(gate - top)
    found = (weights * split[:, :, 0]).sum(axis=1)
    sums = xp.stack([top[:, 0], weights.sum(axis=1), found], axis=2)  # (N, S, 3, D)
    # A part continues the sums in a row of `known`; row 0 holds the sums of no tokens.
    own, known = 1 + parts.row * series, before.reshape(count, 3, -1)
    known = xp.concatenate([xp.zeros_like(known[:1]), known])
    if not spec.overlap:
        own = np.where(parts.fresh, 0, own)
    else:
        following = np.where(parts.fresh, 0, own + 1)
        following = _joined(known[xp.upload(known, following)], sums[:, 0], xp)
        known = xp.concatenate([known, following])
        inside = 1 + count + np.searchsorted(parts.end, parts.begin - 1)
        first = np.isin(parts.begin, plan.query_start)
        own = np.where(parts.fresh, np.where(first, own + 1, inside), own)
    state = _joined(known[xp.upload(known, own)], sums[:, -1], xp)
    ended = state[xp.upload(known, parts.ended)]
    state = xp.stack([state, following] if spec.overlap else [state], axis=1)
    last = parts.end[parts.ended]
    table = frame.vector(op.rope)[xp.upload(known, plan.positions[last] + 1 - spec.ratio)]
    entries = xp.rms_norm(ended[:, 2] / ended[:, 1], frame.vector(op.norm), spec.norm_eps)
    block, offset = np.divmod(plan.slots[group][last], block_size)
    slots = block * -(-block_size // spec.ratio) + offset // spec.ratio
    entries, left = rotate_last(entries[:, None], table, xp), xp.upload(known, parts.left)
    return state[left], entries, xp.upload(known, slots)


def _joined(before: Array, sums: Array, xp: Arrays) -> Array:
    """The sums (N, 3, D) of tokens before, perhaps of none, and of one token or more."""
    higher = xp.maximum(xp.where(before[:, 1] == 0, -xp.inf, before[:, 0]), sums[:, 0])
    old = xp.where(before[:, 1] == 0, 0.0, xp.exp(before[:, 0] - higher))[:, None]
    new, higher = xp.exp(sums[:, 0] - higher)[:, None], higher[:, None]
    return xp.concatenate([higher, old * before[:, 1:] + new * sums[:, 1:]], axis=1)


def rows_seen(op: CompressedAttention, frame: ArrayFrame[Any], before: Array) -> Array:
    """The rows (n, D) that tokens read: of the states (R, 1, window - 1, D), then of the step."""
    x = frame.xp.wide(frame[op.row])[:, None]
    rows = rotate_last(x, _rotations(op, frame), frame.xp)[:, 0]
    return frame.xp.concatenate([before.reshape(-1, op.spec.head_size), rows])


def _rotations(op: CompressedAttention, frame: ArrayFrame[Any]) -> Array:
    """(T, Dr)."""
    table: Array = frame.vector(op.rope)
    return table[frame.xp.upload(table, frame.plan.positions)]


def compressed_attention(
    op: CompressedAttention,
    frame: ArrayFrame[Any],
    seen: Array,
    windows: Array,
    entries_at: Callable[[Array], Array],
    group: int,
    block_size: int,
) -> Array:
    """(T, H * D). Each token reads its `windows` (T, window) of the rows `seen`; `entries_at`:
    slots (t, C) -> (t, C, D)."""
    xp, plan, spec, q = frame.xp, frame.plan, op.spec, frame[op.q]
    table, sinks = _rotations(op, frame), frame.vector(op.sinks)
    heads = xp.rms_norm(xp.wide(q).reshape(len(q), spec.num_heads, -1), None, spec.norm_eps)
    queries = rotate_last(heads, table, xp)  # (T, H, D)
    ages = np.arange(spec.window)[::-1]
    inside = xp.upload(q, plan.positions[:, None] >= ages)  # (T, window)
    counts = (plan.positions + 1) // spec.ratio if spec.ratio else np.zeros_like(plan.positions)
    rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start))
    together = max(1, _GATHERED // (spec.window + int(counts.max())))
    found = []
    for first in range(0, len(q), together):
        some = slice(first, first + together)
        keys, mask = seen[windows[some]], inside[some]
        if most := int(counts[some].max()):
            numbers = np.arange(most)[None]
            entries = xp.upload(q, np.where(numbers < counts[some, None], numbers, -1))
            if op.picked is not None:
                entries = frame[op.picked][some, :most]
            blocks, row = xp.upload(q, plan.block_tables[group]), xp.upload(q, rows[some, None])
            slots, ended = entry_slots(blocks, row, entries, block_size, spec.ratio), entries >= 0
            stored = xp.wide(entries_at(xp.where(ended, slots, 0)))
            keys = xp.concatenate([keys, stored], axis=1)  # (t, C, D)
            mask = xp.concatenate([mask, ended], axis=1)
        keys = xp.where(mask[..., None], keys, 0.0)  # no other row's NaN comes in
        scores = queries[some] @ keys.swapaxes(1, 2) * spec.scale  # (t, H, C)
        scores = xp.where(mask[:, None], scores, -xp.inf)
        by_head = xp.broadcast_to(sinks[None, :, None], (*scores.shape[:2], 1))
        weights = xp.softmax(xp.concatenate([scores, by_head], axis=-1))
        found.append(weights[..., :-1] @ keys)
    half = spec.rotary_dim // 2
    back = xp.concatenate([table[:, :half], -table[:, half:]], axis=1)
    out = found[0] if len(found) == 1 else xp.concatenate(found)
    return xp.like(q, rotate_last(out, back, xp).reshape(q.shape))
