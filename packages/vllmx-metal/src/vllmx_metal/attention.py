"""Attention in MLX's own ops: over pages (write this step's keys and values, gather each batch's
context, attend), and within the rows of a step or the windows of its images, without pages."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
from vllmx_core.ops.attention import AttentionSpec, AttentionWeights, rotate_by
from vllmx_core.ops.segment_attention import SegmentSpec, bias_between, segments

from vllmx_metal.arrays import METAL
from vllmx_metal.fusion import fused
from vllmx_metal.kv_cache import LayerPages, Pages
from vllmx_metal.paged import DecodeRows, paged_decode
from vllmx_metal.paged_prefill import PrefillTiles, paged_prefill
from vllmx_metal.step import GatheredTiles, MetalStep


def attention(
    qkv: mx.array,
    spec: AttentionSpec,
    weights: AttentionWeights[mx.array],
    step: MetalStep,
    pages: LayerPages,
) -> mx.array:
    """(T, (H + 2K) * D) -> (T, H * D); see `AttentionSpec`."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    split = qkv.reshape(-1, spec.num_heads_in, size)  # (T, H + 2K, D)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if not spec.norm_last:
        q, k = _normed(q, k, spec, weights)
    if weights.rope is not None:
        cos, sin = step.rotation(weights.rope, spec.rope_axes)
        q = rotate_by(q, cos, sin, interleaved=spec.interleaved, xp=METAL)
        k = k if spec.shared else rotate_by(k, cos, sin, interleaved=spec.interleaved, xp=METAL)
    if spec.norm_last:
        q, k = _normed(q, k, spec, weights)
    q = pages.k.turned(q).astype(qkv.dtype)
    if not spec.shared:
        pages.k.write(step.slots[pages.group], k)
        pages.v.write(step.slots[pages.group], v)
    cut = step.batches(spec, pages.group)
    if cut.order is not None:
        q = q[cut.order]
    outs, first = [], 0
    for batch in cut.batches:
        queries = q[first : first + batch.tokens]
        outs.append(_attend(queries, batch.over, spec, weights.sinks, pages))
        first += batch.tokens
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)  # (T, H, D)
    if cut.inverse is not None:
        out = out[cut.inverse]
    return pages.v.turned(out).reshape(-1, heads * size)


def _normed(
    q: mx.array, k: mx.array, spec: AttentionSpec, weights: AttentionWeights[mx.array]
) -> tuple[mx.array, mx.array]:
    """The heads by the norms that the layer has: float32 from there on, as the weights."""
    if weights.q_norm is not None:
        q = mx.fast.rms_norm(q, weights.q_norm, spec.norm_eps)
    if weights.k_norm is not None:
        k = mx.fast.rms_norm(k, weights.k_norm, spec.norm_eps)
    return q, k


def _attend(
    q: mx.array,
    batch: GatheredTiles | DecodeRows | PrefillTiles,
    spec: AttentionSpec,
    sinks: mx.array | None,
    pages: LayerPages,
) -> mx.array:
    """q (tokens, H, D) -> the same."""
    if isinstance(batch, DecodeRows):
        return paged_decode(q, spec, sinks, pages, batch)
    if isinstance(batch, PrefillTiles):
        return paged_prefill(q, spec, sinks, pages, batch)
    tiles, queries = batch.tiles, batch.queries

    def gathered(pool: Pages) -> mx.array:
        """(N, K, C, D) what the pages of these rows hold."""
        rows = pool.gather(batch.slots).astype(q.dtype)
        return rows.reshape(tiles, -1, spec.num_kv_heads, spec.head_size).swapaxes(1, 2)

    by_head = q.reshape(tiles, queries, spec.num_heads, spec.head_size).swapaxes(1, 2)
    keys, values = gathered(pages.k), gathered(pages.v)
    if spec.softcap is None:
        out = mx.fast.scaled_dot_product_attention(
            by_head,
            keys,
            values,
            scale=spec.scale,
            mask=batch.mask,
            sinks=None if sinks is None else sinks.astype(q.dtype),
        )
    else:
        out = _capped(by_head, keys, values, batch, spec, spec.softcap, sinks)
    return out.swapaxes(1, 2).reshape(tiles * queries, spec.num_heads, spec.head_size)


@fused
def _cap(scores: mx.array, cap: mx.array) -> mx.array:
    return cap * mx.tanh(scores / cap)


def _capped(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    batch: GatheredTiles,
    spec: AttentionSpec,
    softcap: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention whose scores go through a soft-cap, which MLX's own has no place for. q (N, H, Q,
    D), keys and values (N, K, C, D) -> (N, H, Q, D)."""
    tiles, heads, queries, size = q.shape
    kv_heads = spec.num_kv_heads
    group = heads // kv_heads
    grouped = q.reshape(tiles, kv_heads, group * queries, size)
    scores = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32) * spec.scale
    scores = _cap(scores, mx.array(softcap)).reshape(tiles, heads, queries, -1)  # (N, H, Q, C)
    context = scores.shape[-1]
    if isinstance(batch.mask, mx.array):
        scores = mx.where(batch.mask, scores, -mx.inf)
    elif batch.mask is not None:
        seen = mx.tri(queries, context, context - queries, mx.float32) > 0
        scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        by_head = mx.broadcast_to(sinks[:, None, None], (tiles, heads, queries, 1))
        scores = mx.concatenate([scores, by_head], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :context].astype(values.dtype)
    out = weights.reshape(tiles, kv_heads, group * queries, context) @ values
    return out.reshape(tiles, heads, queries, size)


def segment_attention(
    qkv: mx.array,
    spec: SegmentSpec,
    rope: mx.array | None,
    step: MetalStep,
    bias: mx.array | None = None,
) -> mx.array:
    """(T, (H + 2K) * D) -> (T, H * D); see `SegmentSpec` and `SegmentAttention`."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    split = qkv.reshape(-1, heads + 2 * kv_heads, size)
    q, k, v = mx.split(split, [heads, heads + kv_heads], axis=1)
    if rope is not None:
        cos, sin = step.rotation(rope, spec.rope_axes)
        q = rotate_by(q, cos, sin, interleaved=spec.interleaved, xp=METAL)
        k = rotate_by(k, cos, sin, interleaved=spec.interleaved, xp=METAL)
    by_head = [x.swapaxes(0, 1)[None] for x in (q, k, v)]  # (1, heads, T, D)
    outs = [
        mx.fast.scaled_dot_product_attention(
            *(x[:, :, start:end] for x in by_head),
            scale=spec.scale,
            mask=_added(end - start, spec, by_head[0].dtype, bias),
        )[0].swapaxes(0, 1)  # (n, H, D)
        for start, end in pairwise(segments(spec, step.plan))
        if end > start
    ]
    return mx.concatenate(outs).reshape(-1, heads * size)


def _added(
    length: int, spec: SegmentSpec, dtype: mx.Dtype, bias: mx.array | None
) -> mx.array | None:
    """The window, or with a bias (H, n, n) what is added to scores; None: nothing."""
    seen = _window(length, spec.window)
    if bias is None:
        return seen
    added: mx.array = bias_between(bias, spec.num_heads, length, METAL).astype(dtype)
    return added if seen is None else mx.where(seen, added, -mx.inf)


def _window(length: int, window: int | None) -> mx.array | None:
    """(n, n) True where a token sees another; None: everywhere."""
    if window is None or window >= length:
        return None
    places = np.arange(length)
    return mx.array(np.abs(places[:, None] - places) < window)
