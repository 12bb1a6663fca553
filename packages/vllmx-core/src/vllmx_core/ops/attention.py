"""`attention`: the attention of one layer over its KV cache.

Its test cases cover pages and steps as well as the formula: `vllmx_testing.attention_checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.head import softcap
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector, expect_weight
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import I32, StepPlan
from vllmx_core.records import Record

W = TypeVar("W")


class AttentionSpec(Record):
    """The options of one attention layer. D = head_size.

    The op splits `qkv` (T, (H + 2K) * D) into q | k | v, applies the optional per-head RMS norm to
    q and k, rotates the first `rotary_dim` of D, writes k and v to the layer's pages and attends.
    Query head h reads kv head h // (H / K). A layer that shares gets only q, (T, H * D), writes
    nothing, and reads the pages of an earlier layer.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rotary_dim: int = 0
    interleaved: bool = False
    """False: pairs (i, i + rotary_dim / 2), as Hugging Face; True: pairs (2i, 2i + 1)."""
    norm_eps: float = 1e-6
    norm_last: bool = False
    """True if norms of q and k follow their rotation."""
    window: int | None = None
    chunked: bool = False
    """True if the context is cut into chunks of `window` positions: a token sees those of its own
    chunk. Else it sees the last `window` positions."""
    softcap: float | None = None
    causal: bool = True
    """False: a row sees its whole context, and a window reaches as far forward as back."""
    rope_axes: tuple[int, ...] = ()
    """The line of `StepPlan.rope_positions` that turns each of the rotary_dim / 2 frequencies;
    empty: the token's position turns all."""
    spans: bool = False
    """True if a token sees up to `StepPlan.visible_to`, for images whose tokens attend to each
    other in both directions. A window limits only the past."""
    shared: bool = False
    """True if the pages belong to another layer, which `ModelShape.caches` names."""

    @property
    def reach(self) -> int:
        """The number of positions that a token sees, its own included; below 0: it sees its chunk
        of -reach positions; 0: all before it."""
        return (-1 if self.chunked else 1) * (self.window or 0)

    @property
    def eps(self) -> float:
        """`norm_eps` for kernels, below 0 with `norm_last`."""
        return -self.norm_eps if self.norm_last else self.norm_eps

    @property
    def num_heads_in(self) -> int:
        """Heads that the op is given for each token."""
        return self.num_heads + (0 if self.shared else 2 * self.num_kv_heads)


class AttentionWeights(Record, Generic[W]):
    """The weights that a layer may have, as whatever a backend makes of a weight."""

    rope: W | None = None
    """Constant (positions, rotary_dim) float32: cos of the rotary_dim / 2 frequencies, then sin."""
    q_norm: W | None = None  # (D,)
    k_norm: W | None = None  # (D,)
    sinks: W | None = None  # (H,) extra logit in each head's softmax
    bias: W | None = None
    """((2n - 1) * H,) added to scores by distance, see `SegmentAttention.bias`; contexts have at
    most n tokens."""


NO_WEIGHTS: AttentionWeights[Floats] = AttentionWeights()


class Attention(Op):
    """(T, (H + 2K) * D) -> (T, H * D); see `AttentionSpec` and `AttentionWeights`."""

    name: ClassVar[str] = "attention"
    qkv: Value
    spec: AttentionSpec
    rope: WeightRef | None
    q_norm: WeightRef | None
    k_norm: WeightRef | None
    sinks: WeightRef | None
    bias: WeightRef | None
    out: Value

    @classmethod
    def of(
        cls,
        qkv: Value,
        spec: AttentionSpec,
        weights: AttentionWeights[WeightRef],
        step: StepInputs,
    ) -> Attention:
        expect_features(qkv=qkv)
        expect(isinstance(step, StepInputs), f"layer {spec.layer}: pass on the step itself")
        return cls(
            qkv,
            spec,
            weights.rope,
            weights.q_norm,
            weights.k_norm,
            weights.sinks,
            weights.bias,
            Value(spec.num_heads * spec.head_size),
        )

    def bound(self, get: Callable[[WeightRef], W]) -> AttentionWeights[W]:
        """The weights of the op as a backend has them; `get` gives each."""
        refs = (self.rope, self.q_norm, self.k_norm, self.sinks, self.bias)
        return AttentionWeights(*(None if ref is None else get(ref) for ref in refs))

    def check(self) -> None:
        spec, where = self.spec, f"layer {self.spec.layer}"
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
        width = spec.num_heads_in * size
        wanted = f"{heads}" if spec.shared else f"({heads} + 2 * {kv_heads})"
        qkv = f"{where}: qkv has {self.qkv.width} features, not {wanted} * {size}"
        expect(self.qkv.width == width, f"{qkv} = {width}")
        given = f"{where}: k_norm is given for a layer that shares its keys"
        expect(not (spec.shared and self.k_norm), given)
        expect(heads % kv_heads == 0, f"{where}: {heads} heads over {kv_heads} kv heads")
        expect_rotation(self.rope, spec.rotary_dim, size, spec.rope_axes, f"{where}: ")
        bounded = spec.window is not None and spec.causal and not spec.spans
        expect(bounded or not spec.chunked, f"{where}: chunks need a window and a causal mask")
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                expect_vector(norm, size)
        if self.sinks is not None:
            expect_vector(self.sinks, heads)
        expect_bias(self.bias, heads)

    def compute(self, frame: NumpyFrame) -> None:
        pages, weights = frame.pages[self.spec.layer], self.bound(frame.weight)
        frame[self.out] = attention(
            frame[self.qkv],
            self.spec,
            frame.plan,
            pages.k,
            pages.v,
            frame.kv_dtype,
            weights,
            pages.group,
        )


def expect_rotation(
    rope: WeightRef | None, rotary_dim: int, size: int, axes: tuple[int, ...], where: str = ""
) -> None:
    """A head of `size` features has a table for the `rotary_dim` of them that are rotated, if any,
    and an axis for each frequency, or none. `where` begins messages."""
    even = rotary_dim % 2 == 0 and 0 <= rotary_dim <= size
    expect(even, f"{where}rotary_dim {rotary_dim} of head size {size}")
    given = f"rope is {'absent' if rope is None else 'given'}"
    both = (rope is None) == (rotary_dim == 0)
    expect(both, f"{where}{given}, rotary_dim is {rotary_dim}")
    expect(not axes or len(axes) * 2 == rotary_dim, f"{len(axes)} axes for {rotary_dim} features")
    if rope is not None:
        expect_weight(rope, "constant")
        wide = f"{where}table {rope.name!r} has {rope.cols} columns"
        expect(rope.cols == rotary_dim, f"{wide}, not rotary_dim {rotary_dim}")


def expect_bias(bias: WeightRef | None, heads: int) -> None:
    """A bias, if any, has a number of each head for each distance, the same ones both ways."""
    if bias is not None:
        distances, odd = divmod(bias.rows, heads)
        expect(distances % 2 == 1 and not odd, f"a bias of {bias.rows} for {heads} heads")
        expect_vector(bias, bias.rows)


def bias_of(bias: Array, heads: int, distances: Array) -> Array:
    """(..., H) what is added to the scores of keys that are so many places behind the query, if
    above 0, or before it."""
    by_distance = bias.reshape(-1, heads)
    return by_distance[distances + by_distance.shape[0] // 2]


def rotations(table: Floats, plan: StepPlan, axes: tuple[int, ...]) -> Floats:
    """(T, rotary_dim): cos, then sin, of each token."""
    if not axes or plan.rope_positions is None:
        return table[plan.positions]
    half = len(axes)
    at = plan.rope_positions[list(axes)].T  # (T, rotary_dim / 2)
    column = np.arange(half)
    return np.concatenate([table[at, column], table[at, half + column]], axis=1)


def rotate(x: Array, table: Array, *, interleaved: bool, xp: Arrays = NUMPY) -> Array:
    """RoPE (Su et al. 2021). x (T, heads, D); table (T, rotary_dim): cos, then sin, of each token's
    position. Dimensions from rotary_dim on stay as they are."""
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    return rotate_by(x, cos, sin, interleaved=interleaved, xp=xp)


def rotate_by(x: Array, cos: Array, sin: Array, *, interleaved: bool, xp: Arrays = NUMPY) -> Array:
    """`rotate` by cos and sin (T, 1, rotary_dim / 2)."""
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    parts = list(xp.fused(_rotated)(first, second, cos, sin))
    if interleaved:
        parts = [xp.stack(parts, axis=-1).reshape(*x.shape[:-1], 2 * half)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=-1)


def _rotated(
    xp: Arrays, first: Array, second: Array, cos: Array, sin: Array
) -> tuple[Array, Array]:
    a, b = xp.wide(first), xp.wide(second)
    return xp.like(first, a * cos - b * sin), xp.like(first, b * cos + a * sin)


def attention(
    qkv: Floats,
    spec: AttentionSpec,
    plan: StepPlan,
    k_pages: Floats,
    v_pages: Floats,
    kv_dtype: str | None = None,
    weights: AttentionWeights[Floats] = NO_WEIGHTS,
    group: int = 0,
) -> Floats:
    """(T, (H + 2K) * D) -> (T, H * D). Writes this step's keys and values to the pages (blocks, P,
    K, D), rounded as a cache of `kv_dtype` would (None: unrounded); then each row attends to the
    pages that the plan's block table of `group` lists."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    split = qkv.reshape(qkv.shape[0], spec.num_heads_in, size)  # (T, H + 2K, D)
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=1)
    if not spec.norm_last:
        q, k = normed(q, k, spec, weights, NUMPY)
    if weights.rope is not None:
        table = rotations(weights.rope, plan, spec.rope_axes)
        q = rotate(q, table, interleaved=spec.interleaved)
        k = rotate(k, table, interleaved=spec.interleaved)
    if spec.norm_last:
        q, k = normed(q, k, spec, weights, NUMPY)
    page, slots = k_pages.shape[1], plan.slots[group]
    if not spec.shared:
        kinds = (None, None) if kv_dtype is None else kv_quant.sides(kv_dtype)
        k_pages[slots // page, slots % page] = _stored(k, kinds[0])
        v_pages[slots // page, slots % page] = _stored(v, kinds[1])
    out = np.empty_like(q)  # (T, H, D)
    for row in range(plan.num_rows):
        tokens = slice(int(plan.query_start[row]), int(plan.query_start[row + 1]))
        query_positions = plan.positions[tokens]
        key_positions = _visible(spec, query_positions, int(plan.context_len[row]))
        blocks = plan.block_tables[group][row, key_positions // page]
        keys = k_pages[blocks, key_positions % page]  # (C, K, D)
        values = v_pages[blocks, key_positions % page]  # (C, K, D)
        seen = query_positions
        if spec.spans and plan.visible_to is not None:
            seen = plan.visible_to[tokens]
        mask = attention_mask(spec, query_positions, key_positions, seen)
        bias = None
        if weights.bias is not None:
            distances = key_positions - query_positions[:, None]
            bias = np.moveaxis(bias_of(weights.bias, heads, distances), -1, 0)
        out[tokens] = attend(q[tokens], keys, values, mask, spec, weights.sinks, bias)
    return out.reshape(qkv.shape[0], heads * size)


def normed(
    q: Array, k: Array, spec: AttentionSpec, weights: AttentionWeights[Any], xp: Arrays
) -> tuple[Array, Array]:
    """Heads (T, heads, D) by the norms that the layer has."""
    if weights.q_norm is not None:
        q = xp.rms_norm(q, weights.q_norm, spec.norm_eps)
    if weights.k_norm is not None:
        k = xp.rms_norm(k, weights.k_norm, spec.norm_eps)
    return q, k


def _stored(x: Floats, kv_dtype: str | None) -> Floats:
    return x if kv_dtype is None else kv_quant.rounded(x, kv_dtype)


def _visible(spec: AttentionSpec, query_positions: I32, context_len: int) -> I32:
    """(C,) the positions that any query of the row sees; pages before them may be gone."""
    first = max(0, int(first_seen(query_positions[0], spec.reach)))
    return np.arange(first, context_len, dtype=np.int32)


def first_seen(positions: Array, reach: int) -> Array:
    """The first positions that tokens see, see `AttentionSpec.reach`; below 0: all of them."""
    if reach < 0:
        return positions - positions % -reach
    return positions - reach + 1 if reach else positions * 0


def attention_mask(
    spec: AttentionSpec, query_positions: I32, key_positions: I32, seen: I32 | None = None
) -> npt.NDArray[np.bool_]:
    """(Q, C) True where the query sees the key, up to the position `seen` (its own). Without
    `causal` a window reaches as far forward as back."""
    behind = query_positions[:, None] - key_positions[None, :]  # (Q, C)
    mask: npt.NDArray[np.bool_]
    if spec.causal:
        last = query_positions if seen is None else seen
        mask = key_positions[None, :] <= last[:, None]
    else:
        mask, behind = np.ones(behind.shape, np.bool_), np.abs(behind)
    if spec.chunked:
        mask &= key_positions[None, :] >= first_seen(query_positions, spec.reach)[:, None]
        return mask
    return mask if spec.window is None else mask & (behind < spec.window)


def attend(
    q: Floats,
    keys: Floats,
    values: Floats,
    mask: npt.NDArray[np.bool_],
    spec: AttentionSpec,
    sinks: Floats | None = None,
    bias: Floats | None = None,
) -> Floats:
    """q (Q, H, D), keys and values (C, K, D), mask (Q, C), sinks (H,), bias of scores (H, Q, C) ->
    (Q, H, D)."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (x.swapaxes(0, 1).repeat(group, axis=0) for x in (keys, values))  # (H, C, D)
    scores = softcap(q.swapaxes(0, 1) @ keys.swapaxes(1, 2) * spec.scale, spec.softcap)
    scores = scores if bias is None else scores + bias
    scores = np.where(mask, scores, -np.inf)  # (H, Q, C)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks[:, None, None]  # (H, 1, 1)
        top = np.maximum(top, sinks)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    return like(q, (weights / total @ values).swapaxes(0, 1))
