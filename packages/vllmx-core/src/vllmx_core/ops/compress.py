"""`compress`: one entry of the cache for each window of tokens (DeepSeek-V4, "compressed sparse"
and "heavily compressed attention").

An entry is a sum of the window's rows, weighted channel by channel by a softmax over its tokens,
then normed and rotated. It lies in the page of the window's last token. Sums of a window that has
not ended are a state of the sequence, so that chunks may end anywhere.

Its test cases are in `vllmx_testing.compressed_checks`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.attention import rotate
from vllmx_core.ops.formulas import Floats, NumpyFrame, Pages, state_before, states_after
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector, expect_weight
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import I32, StepPlan
from vllmx_core.records import Record


class CompressSpec(Record):
    """The options of one compressor of entries of D numbers, whose last Dr RoPE rotates by the
    position of the window's first token.

    `kv_gate` (T, 2 * S * D) is rows, then gates, of S series: the window's own or, with `overlap`,
    first those that count for the next window's entry, then those for its own. So an entry has the
    first series of the window before it and the second of its own.
    """

    layer: int
    state: int
    """The number of the state in `ModelShape.states` that holds (S, 3, D): for the entry of the
    window, then for the next one, the greatest gate so far, the sum of exp(gate - greatest), and
    the sum of the rows times that. A sum of 0 is that of no token."""
    size: int  # D
    ratio: int
    """Tokens of a window, W."""
    rotary_dim: int
    overlap: bool
    part: Literal["entries", "keys"]
    """Entries go to the place of the layer's keys, keys of entries to that of its values, where
    `indexer` reads them."""
    norm_eps: float

    @property
    def series(self) -> int:
        return 2 if self.overlap else 1


class Compress(Op):
    """(T, 2 * S * D) into pages and state; see `CompressSpec`. `bias` (W * S * D,) is added to the
    gates of each token of a window."""

    name: ClassVar[str] = "compress"
    results: ClassVar[tuple[str, ...]] = ()
    kv_gate: Value
    spec: CompressSpec
    rope: WeightRef
    bias: WeightRef
    norm: WeightRef  # (D,)

    @classmethod
    def of(
        cls,
        kv_gate: Value,
        spec: CompressSpec,
        rope: WeightRef,
        bias: WeightRef,
        norm: WeightRef,
        step: StepInputs,
    ) -> Compress:
        expect_features(kv_gate=kv_gate)
        expect(isinstance(step, StepInputs), f"layer {spec.layer}: pass on the step itself")
        return cls(kv_gate, spec, rope, bias, norm)

    def check(self) -> None:
        spec, where = self.spec, f"layer {self.spec.layer}"
        wanted = 2 * spec.series * spec.size
        given = f"{where}: kv_gate has {self.kv_gate.width} features, not {wanted}"
        expect(self.kv_gate.width == wanted, given)
        expect(spec.ratio >= 2, f"{where}: windows of {spec.ratio} token")
        expect_rotary(spec.rotary_dim, spec.size, self.rope, where)
        expect_vector(self.bias, spec.ratio * spec.series * spec.size)
        expect_vector(self.norm, spec.size)

    def compute(self, frame: NumpyFrame) -> None:
        spec, pages = self.spec, frame.pages[self.spec.layer]
        compress(
            frame[self.kv_gate],
            spec,
            frame.plan,
            pages,
            frame.states[spec.state],
            frame.kv_dtype,
            rope=frame.weight(self.rope),
            bias=frame.weight(self.bias),
            norm=frame.weight(self.norm),
        )


def expect_rotary(rotary: int, size: int, rope: WeightRef, where: str) -> None:
    """The last `rotary` of `size` numbers are rotated by the table `rope`."""
    even = 2 <= rotary <= size and rotary % 2 == 0
    expect(even, f"{where}: rotary_dim {rotary} of {size}")
    expect_weight(rope, "constant")
    wide = f"{where}: table {rope.name!r} has {rope.cols} columns"
    expect(rope.cols == rotary, f"{wide}, not rotary_dim {rotary}")


def rotate_last(x: Array, table: Array, xp: Arrays = NUMPY) -> Array:
    """x (T, H, D) with its last Dr numbers turned by the rows `table` (T, Dr), pairs (2i, 2i+1)."""
    first = x.shape[-1] - table.shape[-1]
    turned = rotate(x[..., first:], table, interleaved=True, xp=xp)
    return xp.concatenate([x[..., :first], turned], axis=-1)


def compress(
    kv_gate: Floats,
    spec: CompressSpec,
    plan: StepPlan,
    pages: Pages,
    states: Floats,
    kv_dtype: str | None,
    *,
    rope: Floats,
    bias: Floats,
    norm: Floats,
) -> None:
    """Writes the entries of windows that end in this step to `pages`, and the sums of each row to
    the states (slots, S, 3, D)."""
    _, targets = plan.state_slots
    split = kv_gate.reshape(len(kv_gate), 2, spec.series, spec.size)
    in_window = plan.positions % spec.ratio
    kv, gate = split[:, 0], split[:, 1] + bias.reshape(spec.ratio, spec.series, -1)[in_window]
    kept = pages.k if spec.part == "entries" else pages.v
    after = states_after(plan)
    for row in range(plan.num_rows):
        state = state_before(plan, row, states)  # (S, 3, D)
        for t in range(int(plan.query_start[row]), int(plan.query_start[row + 1])):
            if in_window[t] == 0:
                state = np.concatenate([state[1:], np.zeros_like(state[:1])])
            state = _with_token(state, kv[t, ::-1], gate[t, ::-1])
            if in_window[t] == spec.ratio - 1:
                first = plan.positions[t] + 1 - spec.ratio
                entry = NUMPY.rms_norm(state[0, 2] / state[0, 1], norm, spec.norm_eps)
                entry = rotate_last(entry[None, None], rope[first][None])[0]  # (1, D)
                if kv_dtype is not None:
                    entry = kv_quant.rounded(entry, kv_dtype)
                block, offset = divmod(int(plan.slots[pages.group][t]), pages.block_size)
                kept[block, offset // spec.ratio] = entry
            if after[t] >= 0:
                states[after[t]] = state
        states[targets[row]] = state


def _with_token(state: Floats, kv: Floats, gate: Floats) -> Floats:
    """The sums (S, 3, D) with another token's rows and gates (S, D)."""
    top, total, found = state.swapaxes(0, 1)  # (S, D) each
    top = np.where(total == 0, -np.inf, top)
    higher = np.maximum(top, gate)
    before, now = np.exp(top - higher), np.exp(gate - higher)
    return np.stack([higher, before * total + now, before * found + now * kv], axis=1)


def entry_slots(table: Array, rows: Array, entries: Array, block_size: int, ratio: int) -> Array:
    """The indices of `entries` among the rows of all pages, by the block table (R, B) of `rows`."""
    last = (entries + 1) * ratio - 1
    blocks = table[rows, last // block_size]
    return blocks * -(-block_size // ratio) + last % block_size // ratio


def entries_of(kept: Floats, blocks: I32, block_size: int, ratio: int, count: int) -> Floats:
    """(count, D) a row's first entries; `kept` (blocks, entries of a page, 1, D), `blocks` (B,) the
    row's block table."""
    last = np.arange(count) * ratio + ratio - 1
    found: Floats = kept[blocks[last // block_size], last % block_size // ratio, 0]
    return found
