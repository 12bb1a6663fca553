"""`compressed_attention`: attention to a window of tokens and to compressed entries (DeepSeek-V4).

All heads read one row for each token, which is key and value at once. The rows of the window are a
state of the sequence; the entries that `compress` made lie in pages.

Its test cases are in `vllmx_testing.compressed_checks`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.arrays import NUMPY
from vllmx_core.ops.compress import entries_of, expect_rotary, rotate_last
from vllmx_core.ops.formulas import Floats, NumpyFrame, Pages, like, state_before, states_after
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import I32, StepPlan
from vllmx_core.records import Record


class CompressedAttentionSpec(Record):
    """The options of one layer of H heads of D numbers; RoPE rotates the last Dr of a head.

    Each head of a query is divided by its root mean square. A query sees its own row, those of the
    `window` - 1 tokens before it, and the entries of all windows of `ratio` tokens that have ended,
    or those picked. The result's last Dr numbers are rotated back by the query's position.
    """

    state: int
    """The number of the state in `ModelShape.states` that holds (1, window - 1, D), the rows of the
    last tokens in an order that the backend chooses."""
    num_heads: int  # H
    head_size: int  # D
    rotary_dim: int  # Dr
    window: int
    scale: float
    norm_eps: float
    layer: int | None = None
    """The layer whose pages have the entries; None: there are none."""
    ratio: int = 0
    """Tokens of an entry."""


class CompressedAttention(Op):
    """q (T, H * D), rows (T, D) -> (T, H * D); see `CompressedAttentionSpec`. `sinks` (H,) are
    logits that take part in each softmax and add nothing. With `picked` (T, K) a token attends to
    these entries alone."""

    name: ClassVar[str] = "compressed_attention"
    q: Value
    row: Value
    spec: CompressedAttentionSpec
    rope: WeightRef
    sinks: WeightRef
    picked: Value | None
    out: Value

    @classmethod
    def of(
        cls,
        q: Value,
        row: Value,
        spec: CompressedAttentionSpec,
        step: StepInputs,
        rope: WeightRef,
        sinks: WeightRef,
        picked: Value | None = None,
    ) -> CompressedAttention:
        expect_features(q=q, row=row)
        expect(isinstance(step, StepInputs), f"state {spec.state}: pass on the step itself")
        return cls(q, row, spec, rope, sinks, picked, Value(q.width))

    def check(self) -> None:
        spec, where = self.spec, f"state {self.spec.state}"
        wanted = spec.num_heads * spec.head_size
        expect(self.q.width == wanted, f"{where}: q has {self.q.width} features, not {wanted}")
        given = f"{where}: row has {self.row.width} features, not {spec.head_size}"
        expect(self.row.width == spec.head_size, given)
        expect(spec.window >= 2, f"{where}: a window of {spec.window} token")
        entries = f"{where}: entries of {spec.ratio} tokens in layer {spec.layer}"
        expect((spec.layer is None) == (spec.ratio == 0), entries)
        expect_rotary(spec.rotary_dim, spec.head_size, self.rope, where)
        expect_vector(self.sinks, spec.num_heads)
        if self.picked is not None:
            picks = self.picked.dtype == "i32" and spec.layer is not None
            expect(picks, f"{where}: picked is not what `indexer` gave")

    def compute(self, frame: NumpyFrame) -> None:
        spec = self.spec
        frame[self.out] = compressed_attention(
            frame[self.q],
            frame[self.row],
            spec,
            frame.plan,
            frame.states[spec.state],
            None if spec.layer is None else frame.pages[spec.layer],
            rope=frame.weight(self.rope),
            sinks=frame.weight(self.sinks),
            picked=None if self.picked is None else frame[self.picked],
        )


def compressed_attention(
    q: Floats,
    row: Floats,
    spec: CompressedAttentionSpec,
    plan: StepPlan,
    states: Floats,
    pages: Pages | None,
    *,
    rope: Floats,
    sinks: Floats,
    picked: I32 | None = None,
) -> Floats:
    """(T, H * D), (T, D) -> (T, H * D), over and into the states (slots, 1, window - 1, D)."""
    table = rope[plan.positions]  # (T, Dr)
    heads = NUMPY.rms_norm(q.reshape(len(q), spec.num_heads, -1), None, spec.norm_eps)
    queries = rotate_last(heads, table)  # (T, H, D)
    rows = rotate_last(row[:, None], table)[:, 0]  # (T, D)
    out = np.empty_like(queries)
    for number in range(plan.num_rows):
        tokens = slice(int(plan.query_start[number]), int(plan.query_start[number + 1]))
        positions = plan.positions[tokens]
        keys, mask = _window(spec, plan, number, rows, states)
        if pages is not None:
            count = int(plan.context_len[number]) // spec.ratio
            blocks = plan.block_tables[pages.group][number]
            entries = entries_of(pages.k, blocks, pages.block_size, spec.ratio, count)
            seen = np.arange(count) < (positions[:, None] + 1) // spec.ratio  # (Q, entries)
            if picked is not None:
                seen &= (picked[tokens, :, None] == np.arange(count)).any(axis=1)
            keys, mask = np.concatenate([keys, entries]), np.concatenate([mask, seen], axis=1)
        out[tokens] = _attend(queries[tokens], keys, mask, sinks, spec.scale)
    half = spec.rotary_dim // 2
    back = np.concatenate([table[:, :half], -table[:, half:]], axis=1)
    return like(q, rotate_last(out, back).reshape(q.shape))


def _window(
    spec: CompressedAttentionSpec, plan: StepPlan, number: int, rows: Floats, states: Floats
) -> tuple[Floats, I32]:
    """A row's keys (N, D) of this step and before, and which each query sees (Q, N). Keeps the new
    ones in the states."""
    size = spec.window - 1
    begin, end = int(plan.query_start[number]), int(plan.query_start[number + 1])
    first = int(plan.positions[begin])
    kept = state_before(plan, number, states)[0]  # (window - 1, D)
    before = np.arange(max(0, first - size), first)
    keys = np.concatenate([kept[before % size], rows[begin:end]])
    key_positions = np.concatenate([before, plan.positions[begin:end]])
    after = states_after(plan)
    for t in range(begin, end):
        kept[plan.positions[t] % size] = rows[t]
        if after[t] >= 0:
            states[after[t], 0] = kept
    states[plan.state_slots[1][number], 0] = kept
    behind = plan.positions[begin:end, None] - key_positions
    return keys, (behind >= 0) & (behind < spec.window)


def _attend(queries: Floats, keys: Floats, mask: I32, sinks: Floats, scale: float) -> Floats:
    """queries (Q, H, D), keys (N, D), mask (Q, N) -> (Q, H, D)."""
    scores = np.where(mask, queries.swapaxes(0, 1) @ keys.T * scale, -np.inf)  # (H, Q, N)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sinks[:, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - top)
    found: Floats = weights / total @ keys
    return found.swapaxes(0, 1)
