"""Numpy twins of `vllmx_core.model.Ops`: the oracle of every backend.

Written to be read: no fusion, no blocking, one formula after the other, in the dtype of the inputs
(float32, or float64 when a test asks how far float32 itself is off). Shapes as in
`vllmx_core.plan`; pages are (blocks, P, K, D).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vllmx_core import kv_quant
from vllmx_core.model import Activation, AttentionSpec
from vllmx_core.plan import I32, StepPlan

Floats = npt.NDArray[np.floating[Any]]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def embedding(ids: I32, table: Floats) -> Floats:
    """(T,), (V, E) -> (T, E)."""
    return table[ids]


def rms_norm(x: Floats, w: Floats, eps: float) -> Floats:
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * w over the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return _as(x, x / np.sqrt(mean_square + eps) * w)


def add_rms_norm(
    x: Floats, residual: Floats | None, w: Floats, eps: float
) -> tuple[Floats, Floats]:
    """(normalised sum, sum)."""
    total = x if residual is None else x + residual
    return rms_norm(total, w, eps), total


def layer_norm(x: Floats, w: Floats, bias: Floats | None, eps: float) -> Floats:
    """(x - mean) / sqrt(var + eps) * w + bias over the last axis."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    scaled = centred / np.sqrt(variance + eps) * w
    return _as(x, scaled if bias is None else scaled + bias)


def linear(x: Floats, w: Floats, bias: Floats | None = None) -> Floats:
    """(T, in), (out, in), (out,) -> (T, out)."""
    product = x @ w.T
    return _as(x, product if bias is None else product + bias)


def activation(x: Floats, kind: Activation) -> Floats:
    """silu, gelu (exact, by erf), gelu_tanh or relu."""
    if kind == "silu":
        with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
            return _as(x, x / (1 + np.exp(-x)))
    if kind == "gelu":
        return _as(x, 0.5 * x * (1 + _erf(x / math.sqrt(2))))
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return _as(x, 0.5 * x * (1 + np.tanh(inner)))
    if kind == "relu":
        return np.maximum(x, 0)
    raise ValueError(f"unknown activation {kind!r}")


def gated_act(gate_up: Floats, kind: Activation) -> Floats:
    """(T, 2F), the gate first -> (T, F)."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return activation(gate, kind) * up


def softcap(x: Floats, cap: float | None) -> Floats:
    """cap * tanh(x / cap); x itself when cap is None."""
    return x if cap is None else _as(x, cap * np.tanh(x / cap))


def logits(x: Floats, rows: I32, w: Floats, bias: Floats | None, cap: float | None) -> Floats:
    """(T, E), (L,), (V, E), (V,) -> (L, V)."""
    return softcap(linear(x[rows], w, bias), cap)


def rotate(x: Floats, table: Floats, *, interleaved: bool) -> Floats:
    """RoPE (Su et al. 2021). x (T, heads, D); table (T, rotary_dim): cos, then sin, of each token's
    position. Dimensions from rotary_dim on stay as they are."""
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]  # (T, 1, rotary_dim / 2)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated


def attention(
    qkv: Floats,
    spec: AttentionSpec,
    plan: StepPlan,
    k_pages: Floats,
    v_pages: Floats,
    kv_dtype: str | None = None,
) -> Floats:
    """(T, (H + 2K) * D) -> (T, H * D). Writes this step's keys and values to the pages, rounded as
    a cache of `kv_dtype` would (None: as they are), then each row attends to what the pages hold.
    Norm weights, RoPE table and sinks of `spec` are arrays."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    split = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, size)  # (T, H + 2K, D)
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=1)
    if spec.q_norm is not None:
        q = rms_norm(q, spec.q_norm, spec.norm_eps)
    if spec.k_norm is not None:
        k = rms_norm(k, spec.k_norm, spec.norm_eps)
    if spec.rope is not None:
        table = spec.rope[plan.positions]  # (T, rotary_dim)
        q = rotate(q, table, interleaved=spec.interleaved)
        k = rotate(k, table, interleaved=spec.interleaved)
    if kv_dtype is not None:
        k, v = kv_quant.rounded(k, kv_dtype), kv_quant.rounded(v, kv_dtype)
    page = k_pages.shape[1]
    k_pages[plan.slots // page, plan.slots % page] = k
    v_pages[plan.slots // page, plan.slots % page] = v
    out = np.empty_like(q)  # (T, H, D)
    for row in range(plan.num_rows):
        tokens = slice(int(plan.query_start[row]), int(plan.query_start[row + 1]))
        query_positions = plan.positions[tokens]
        key_positions = _visible(spec, query_positions, int(plan.context_len[row]))
        blocks = plan.block_table[row, key_positions // page]
        keys = k_pages[blocks, key_positions % page]  # (C, K, D)
        values = v_pages[blocks, key_positions % page]  # (C, K, D)
        mask = attention_mask(spec, query_positions, key_positions)
        out[tokens] = attend(q[tokens], keys, values, mask, spec)
    return out.reshape(qkv.shape[0], heads * size)


def _visible(spec: AttentionSpec, query_positions: I32, context_len: int) -> I32:
    """(C,) the positions that any query of the row sees; pages before them may be gone."""
    first = 0
    if spec.window is not None:
        first = max(0, int(query_positions[0]) - spec.window + 1)
    return np.arange(first, context_len, dtype=np.int32)


def attention_mask(
    spec: AttentionSpec, query_positions: I32, key_positions: I32
) -> npt.NDArray[np.bool_]:
    """(Q, C) True where the query sees the key. Without `causal` a window reaches as far forward as
    back."""
    behind = query_positions[:, None] - key_positions[None, :]  # (Q, C)
    mask = behind >= 0 if spec.causal else np.ones(behind.shape, np.bool_)
    if spec.window is not None:
        mask = mask & (np.abs(behind) < spec.window)
    return mask


def attend(
    q: Floats, keys: Floats, values: Floats, mask: npt.NDArray[np.bool_], spec: AttentionSpec
) -> Floats:
    """q (Q, H, D), keys and values (C, K, D), mask (Q, C) -> (Q, H, D)."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)  # (C, H, D)
    scores = softcap(np.einsum("qhd,chd->hqc", q, keys) * spec.scale, spec.softcap)
    scores = np.where(mask, scores, -np.inf)  # (H, Q, C)
    top = scores.max(axis=-1, keepdims=True)
    if spec.sinks is not None:
        sinks = spec.sinks[:, None, None]  # (H, 1, 1)
        top = np.maximum(top, sinks)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if spec.sinks is not None:
        total = total + np.exp(sinks - top)
    return _as(q, np.einsum("hqc,chd->qhd", weights / total, values))


def _as(like: Floats, values: Floats) -> Floats:
    """In the dtype of `like`, which scalars and erf may have widened."""
    return values.astype(like.dtype, copy=False)
