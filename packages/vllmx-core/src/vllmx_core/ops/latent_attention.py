"""`latent_attention`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over its cache.

A layer keeps one row for all heads: the normed latent and the rotated part of the key. Keys and
values are never expanded. `k_b` maps a head's query into the space of the latents, where all heads
read the same rows, and `v_b` maps their result back ("absorbed"). Prefill and decode do the same,
so that results do not depend on how a prompt was cut.

Its test cases are in `vllmx_testing.latent_checks`.
"""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.arrays import NUMPY
from vllmx_core.ops.attention import rotate
from vllmx_core.ops.formulas import Floats, NumpyFrame, Pages, like
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector, expect_weight
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import I32, StepPlan
from vllmx_core.records import Record

W = TypeVar("W")


class LatentSpec(Record):
    """The options of one layer. H heads, C rank, Dn nope_size, Dr rotary_dim, Dv value_size.

    `latent` (T, C + Dr) is a latent, which is normed, and a key part, which is rotated; both are
    written to the layer's pages as one row. Each head of `q` (T, H * (Dn + Dr)) is a part that
    meets the latent and one that is rotated.
    """

    layer: int
    num_heads: int
    rank: int
    nope_size: int
    rotary_dim: int
    value_size: int
    scale: float
    interleaved: bool = True
    """True: pairs (2i, 2i + 1); False: pairs (i, i + Dr / 2)."""
    norm_eps: float = 1e-6

    @property
    def row_size(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rotary_dim


class LatentWeights(Record, Generic[W]):
    """The weights of a layer, as whatever a backend makes of a weight."""

    rope: W
    """Constant (positions, Dr) float32: cos of the Dr / 2 frequencies, then sin."""
    norm: W  # (C,)
    k_b: W
    """H matrices (C, Dn): from a head's query to the latents."""
    v_b: W
    """H matrices (Dv, C): from the latents to a head's answer."""


class LatentAttention(Op):
    """(T, H * (Dn + Dr)), (T, C + Dr) -> (T, H * Dv); see `LatentSpec` and `LatentWeights`. With
    `picked` (T, K) a token attends to these positions alone, as `Indexer` gives them."""

    name: ClassVar[str] = "latent_attention"
    q: Value
    latent: Value
    spec: LatentSpec
    rope: WeightRef
    norm: WeightRef
    k_b: WeightRef
    v_b: WeightRef
    picked: Value | None
    out: Value

    @classmethod
    def of(
        cls,
        q: Value,
        latent: Value,
        spec: LatentSpec,
        weights: LatentWeights[WeightRef],
        step: StepInputs,
        picked: Value | None = None,
    ) -> LatentAttention:
        expect_features(q=q, latent=latent)
        expect(isinstance(step, StepInputs), f"layer {spec.layer}: pass on the step itself")
        return cls(
            q,
            latent,
            spec,
            weights.rope,
            weights.norm,
            weights.k_b,
            weights.v_b,
            picked,
            Value(spec.num_heads * spec.value_size),
        )

    def check(self) -> None:
        spec, where = self.spec, f"layer {self.spec.layer}"
        heads, rotary = spec.num_heads, spec.rotary_dim
        wanted = heads * (spec.nope_size + rotary)
        q = f"{where}: q has {self.q.width} features, not {heads} * ({spec.nope_size} + {rotary})"
        expect(self.q.width == wanted, f"{q} = {wanted}")
        row = f"{where}: latent has {self.latent.width} features, not {spec.rank} + {rotary}"
        expect(self.latent.width == spec.row_size, f"{row} = {spec.row_size}")
        expect(rotary >= 2 and rotary % 2 == 0, f"{where}: rotary_dim {rotary}")
        expect_weight(self.rope, "constant")
        wide = f"{where}: table {self.rope.name!r} has {self.rope.cols} columns"
        expect(self.rope.cols == rotary, f"{wide}, not rotary_dim {rotary}")
        expect_vector(self.norm, spec.rank)
        _expect_stack(self.k_b, heads, spec.rank, spec.nope_size)
        _expect_stack(self.v_b, heads, spec.value_size, spec.rank)
        if self.picked is not None:
            expect(self.picked.dtype == "i32", f"{where}: picked is not what `indexer` gave")

    def compute(self, frame: NumpyFrame) -> None:
        refs = (self.rope, self.norm, self.k_b, self.v_b)
        weights = LatentWeights(*(frame.weight(ref) for ref in refs))
        frame[self.out] = latent_attention(
            frame[self.q],
            frame[self.latent],
            self.spec,
            frame.plan,
            frame.pages[self.spec.layer],
            frame.kv_dtype,
            weights,
            None if self.picked is None else frame[self.picked],
        )


def _expect_stack(w: WeightRef, count: int, rows: int, cols: int) -> None:
    expect_weight(w, "stack")
    found = f"{w.name!r} is {w.count} matrices of {w.rows} x {w.cols}"
    same = (w.count, w.rows, w.cols) == (count, rows, cols)
    expect(same, f"{found}, not {count} of {rows} x {cols}")


def latent_attention(
    q: Floats,
    latent: Floats,
    spec: LatentSpec,
    plan: StepPlan,
    pages: Pages,
    kv_dtype: str | None,
    weights: LatentWeights[Floats],
    picked: I32 | None = None,
) -> Floats:
    """(T, H * (Dn + Dr)), (T, C + Dr) -> (T, H * Dv). Writes this step's rows to the pages, whose
    `k` is (blocks, P, 1, C + Dr), rounded as a cache of `kv_dtype` would; then each token attends
    to the pages, or to the positions in `picked` (T, K)."""
    table, rank = weights.rope[plan.positions], spec.rank  # (T, Dr)
    turned = rotate(latent[:, None, rank:], table, interleaved=spec.interleaved)[:, 0]
    normed = NUMPY.rms_norm(latent[:, :rank], weights.norm, spec.norm_eps)
    kept = np.concatenate([normed, turned], axis=1)  # (T, C + Dr)
    if kv_dtype is not None:
        kept = kv_quant.rounded(kept, kv_dtype)
    page, slots, rows = pages.k.shape[1], plan.slots[pages.group], pages.k[:, :, 0]
    rows[slots // page, slots % page] = kept
    heads = q.reshape(-1, spec.num_heads, spec.nope_size + spec.rotary_dim)
    absorbed = np.einsum("thn,hcn->thc", heads[..., : spec.nope_size], weights.k_b)
    turned = rotate(heads[..., spec.nope_size :], table, interleaved=spec.interleaved)
    queries = np.concatenate([absorbed, turned], axis=2)  # (T, H, C + Dr)
    found = np.empty_like(absorbed)  # (T, H, C)
    for row in range(plan.num_rows):
        tokens = slice(int(plan.query_start[row]), int(plan.query_start[row + 1]))
        positions = np.arange(int(plan.context_len[row]))
        blocks = plan.block_tables[pages.group][row, positions // page]
        mask = positions[None, :] <= plan.positions[tokens, None]  # (Q, N)
        if picked is not None:
            chosen = np.zeros((len(mask), len(positions) + 1), np.bool_)
            np.put_along_axis(chosen, picked[tokens], True, axis=1)  # -1 is the last column
            mask &= chosen[:, :-1]
        found[tokens] = _attend(queries[tokens], rows[blocks, positions % page], mask, spec)
    out = np.einsum("thc,hvc->thv", found, weights.v_b)
    return like(q, out.reshape(len(q), -1))


def _attend(queries: Floats, rows: Floats, mask: npt.NDArray[np.bool_], spec: LatentSpec) -> Floats:
    """queries (Q, H, C + Dr), rows (N, C + Dr), mask (Q, N) -> (Q, H, C)."""
    scores = queries.swapaxes(0, 1) @ rows.T * spec.scale  # (H, Q, N)
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    found: Floats = weights @ rows[:, : spec.rank]  # (H, Q, C)
    return found.swapaxes(0, 1)
