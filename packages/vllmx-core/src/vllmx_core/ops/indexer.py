"""`indexer`: picks the tokens that each query attends to (DeepSeek sparse attention, "lightning
indexer", arXiv 2512.02556).

A layer keeps one small key for each token, in the value pages of its latent attention. A token's
score is the sum over the indexer's heads of weight * relu(q . k). Factors that are equal for all
tokens do not change the choice and are left out, as is the Hadamard rotation of published code,
which turns queries and keys alike; keys are kept in the dtype of the cache.

Its test cases are in `vllmx_testing.sparse_checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.attention import rotate
from vllmx_core.ops.compress import entries_of, rotate_last
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_features, expect_weight
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import StepPlan
from vllmx_core.records import Record

MOST_SCORES = 1 << 24
"""Array libraries make about so many scores of heads at a time."""
TILE_TOKENS = 128
"""Tokens of a row that are scored together."""


class IndexerSpec(Record):
    """The options of one layer: H heads of D numbers. RoPE rotates the first Dr of them."""

    layer: int
    num_heads: int
    head_size: int
    rotary_dim: int
    picked: int
    """The most tokens that a query attends to, K."""
    interleaved: bool = False
    """True: pairs (2i, 2i + 1); False: pairs (i, i + Dr / 2)."""
    ratio: int = 1
    """Above 1: keys are of entries of so many tokens, which `compress` made; RoPE rotates the last
    Dr numbers of a query, and a query picks among the entries that have ended, by their numbers."""


class Indexer(Op):
    """q (T, H * D), keys (T, D), head weights (T, H) -> (T, K) positions, ascending, then -1;
    without keys the numbers of entries that `compress` made. Writes the rotated keys to the layer's
    pages. A query picks among positions up to its own: all if at most K, otherwise the highest
    scores, ties to the earlier position. NaN is the lowest score."""

    name: ClassVar[str] = "indexer"
    q: Value
    key: Value | None
    head_weights: Value
    spec: IndexerSpec
    rope: WeightRef
    out: Value

    @classmethod
    def of(
        cls,
        q: Value,
        key: Value | None,
        head_weights: Value,
        spec: IndexerSpec,
        step: StepInputs,
        rope: WeightRef,
    ) -> Indexer:
        expect_features(q=q, head_weights=head_weights)
        if key is not None:
            expect_features(key=key)
        expect(isinstance(step, StepInputs), f"layer {spec.layer}: pass on the step itself")
        return cls(q, key, head_weights, spec, rope, Value(spec.picked, dtype="i32"))

    def check(self) -> None:
        spec, where = self.spec, f"layer {self.spec.layer}"
        sizes = f"{where}: {spec.num_heads} heads of {spec.head_size}, {spec.picked} picked"
        expect(min(spec.num_heads, spec.head_size, spec.picked) >= 1, sizes)
        wanted = {
            "q": (self.q, spec.num_heads * spec.head_size),
            "head_weights": (self.head_weights, spec.num_heads),
        }
        keyed = f"{where}: keys are for entries of 1 token, not {spec.ratio}"
        expect((self.key is not None) == (spec.ratio == 1), keyed)
        if self.key is not None:
            wanted["key"] = (self.key, spec.head_size)
        for name, (value, width) in wanted.items():
            given = f"{where}: {name} has {value.width} features, not {width}"
            expect(value.width == width, given)
        rotary = spec.rotary_dim
        even = 2 <= rotary <= spec.head_size and rotary % 2 == 0
        expect(even, f"{where}: rotary_dim {rotary} of {spec.head_size}")
        expect_weight(self.rope, "constant")
        wide = f"{where}: table {self.rope.name!r} has {self.rope.cols} columns"
        expect(self.rope.cols == rotary, f"{wide}, not rotary_dim {rotary}")

    def compute(self, frame: NumpyFrame) -> None:
        spec, plan, pages = self.spec, frame.plan, frame.pages[self.spec.layer]
        table = frame.weight(self.rope)[plan.positions]  # (T, Dr)
        page, slots = pages.block_size, plan.slots[pages.group]
        if self.key is None:
            heads = frame[self.q].reshape(-1, spec.num_heads, spec.head_size)
            q = rotate_last(heads, table)
        else:
            q, kept = rotated(frame[self.q], frame[self.key], table, spec, NUMPY)
            if frame.kv_dtype is not None:
                kept = kv_quant.rounded(kept, frame.kv_dtype)
            pages.v[slots // page, slots % page, 0] = kept

        def keys_of(row: int) -> Array:
            count = int(plan.context_len[row]) // spec.ratio
            blocks = plan.block_tables[pages.group][row]
            return entries_of(pages.v, blocks, page, spec.ratio, count)

        weights = frame[self.head_weights]
        frame[self.out] = pick_by_rows(q, weights, plan.positions, plan, spec, keys_of, NUMPY)


def rotated(
    q: Array, key: Array, table: Array, spec: IndexerSpec, xp: Arrays
) -> tuple[Array, Array]:
    """q (T, H, D) and keys (T, D), turned by the rows `table` (T, Dr)."""
    heads = q.reshape(-1, spec.num_heads, spec.head_size)
    turned = rotate(heads, table, interleaved=spec.interleaved, xp=xp)
    return turned, rotate(key[:, None], table, interleaved=spec.interleaved, xp=xp)[:, 0]


def pick_by_rows(
    q: Array,
    head_weights: Array,
    positions: Array,
    plan: StepPlan,
    spec: IndexerSpec,
    keys_of: Callable[[int], Array],
    xp: Arrays,
) -> Array:
    """q (T, H, D), weights (T, H), positions (T,) -> (T, K), row by row. `keys_of`: (N, D) keys of
    a row's context, which a row that picks all of them does not need."""
    found = []
    if spec.ratio > 1:
        positions = (positions + 1) // spec.ratio - 1  # the last entry that has ended
    for row in range(plan.num_rows):
        begin, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
        if int(plan.context_len[row]) // spec.ratio <= spec.picked:
            every = xp.arange_like(positions, spec.picked)[None]  # (1, K)
            seen = every <= positions[begin:end, None]
            found.append(xp.where(seen, every, -1))
            continue
        keys = keys_of(row)
        for first in range(begin, end, TILE_TOKENS):
            some = slice(first, min(first + TILE_TOKENS, end))
            scores = index_scores(q[some], keys, head_weights[some], xp)
            found.append(pick(scores, positions[some], spec.picked, xp))
    return found[0] if len(found) == 1 else xp.concatenate(found)


def index_scores(q: Array, keys: Array, head_weights: Array, xp: Arrays) -> Array:
    """q (T, H, D), keys (N, D), weights (T, H) -> (T, N), some tokens at a time."""
    together = max(1, MOST_SCORES // (q.shape[1] * len(keys)))
    found = []
    for first in range(0, len(q), together):
        some = slice(first, first + together)
        of_heads = xp.relu(q[some] @ keys.T)  # (t, H, N)
        found.append((of_heads * head_weights[some][:, :, None]).sum(axis=1))
    return found[0] if len(found) == 1 else xp.concatenate(found)


def pick(scores: Array, positions: Array, count: int, xp: Arrays) -> Array:
    """scores (T, N), positions (T,) -> (T, count) of N or fewer; see `Indexer`."""
    seen = xp.arange_like(positions, scores.shape[1])[None] <= positions[:, None]  # (T, N)
    scores = xp.where(seen & ~xp.isnan(scores), scores, -xp.inf)
    # What is not seen is behind all that is, so that a tie is never decided for it.
    order = xp.cast(xp.falling(scores)[:, :count], positions.dtype)
    order = -xp.descending(-order)
    return xp.where(order <= positions[:, None], order, -1)
