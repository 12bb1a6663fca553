"""Latent attention in MLX's own ops: write this step's rows, gather each batch's context, attend
with all heads over the same rows."""

from __future__ import annotations

import mlx.core as mx
from vllmx_core.ops.attention import AttentionSpec, rotate_by
from vllmx_core.ops.latent_attention import LatentSpec

from vllmx_metal.arrays import METAL
from vllmx_metal.indexer import picked_batches
from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.matrices import LinearWeight
from vllmx_metal.step import GatheredTiles, MetalStep

_SCORES = 1 << 24
"""Heads are attended together as far as their scores are no more than about so many."""


def latent_attention(
    q: mx.array,
    latent: mx.array,
    spec: LatentSpec,
    rope: mx.array,
    norm: mx.array,
    k_b: LinearWeight,
    v_b: LinearWeight,
    step: MetalStep,
    pages: LayerPages,
    picked: mx.array | None = None,
) -> mx.array:
    """(T, H * (Dn + Dr)), (T, C + Dr) -> (T, H * Dv); see `LatentSpec` and `LatentAttention`."""
    rank, nope, dtype = spec.rank, spec.nope_size, q.dtype
    cos, sin = step.rotation(rope)
    turned = rotate_by(latent[:, None, rank:], cos, sin, interleaved=spec.interleaved, xp=METAL)
    normed = mx.fast.rms_norm(latent[:, None, :rank], norm, spec.norm_eps)
    pages.k.write(step.slots[pages.group], mx.concatenate([normed, turned], axis=-1))
    heads = q.reshape(-1, spec.num_heads, nope + spec.rotary_dim)
    turned = rotate_by(heads[..., nope:], cos, sin, interleaved=spec.interleaved, xp=METAL)
    absorbed = by_head(heads[..., :nope], k_b).astype(dtype)
    queries = mx.concatenate([absorbed, turned], axis=-1)  # (T, H, C + Dr)
    cut = (
        step.batches(_as_attention(spec), pages.group, gathered=True)
        if picked is None
        else picked_batches(step, pages, picked)
    )
    if cut.order is not None:
        queries = queries[cut.order]
    outs, first = [], 0
    for batch in cut.batches:
        assert isinstance(batch.over, GatheredTiles)
        outs.append(_attend(queries[first : first + batch.tokens], batch.over, spec, pages))
        first += batch.tokens
    found = outs[0] if len(outs) == 1 else mx.concatenate(outs)  # (T, H, C)
    if cut.inverse is not None:
        found = found[cut.inverse]
    return by_head(found, v_b).astype(dtype).reshape(len(q), -1)


def _as_attention(spec: LatentSpec) -> AttentionSpec:
    """Attention with one key for all heads, of which batches are made."""
    return AttentionSpec(spec.layer, spec.num_heads, 1, spec.row_size, spec.scale)


def by_head(x: mx.array, stack: LinearWeight) -> mx.array:
    """x (T, H, in) times the matrix of each head -> (T, H, out)."""
    each = mx.arange(x.shape[1], dtype=mx.uint32)
    return stack.multiply_each(x.swapaxes(0, 1), each, ordered=True).swapaxes(0, 1)


def _attend(
    queries: mx.array, batch: GatheredTiles, spec: LatentSpec, pages: LayerPages
) -> mx.array:
    """queries (tokens, H, C + Dr) -> (tokens, H, C)."""
    tiles, tokens = batch.tiles, batch.queries
    rows = pages.k.gather(batch.slots).astype(queries.dtype)
    rows = rows.reshape(tiles, 1, -1, spec.row_size)  # (N, 1, keys, C + Dr)
    by_head = queries.reshape(tiles, tokens, spec.num_heads, spec.row_size).swapaxes(1, 2)
    together = max(1, _SCORES // (tiles * tokens * rows.shape[2]))
    parts = [
        mx.fast.scaled_dot_product_attention(
            by_head[:, first : first + together],
            rows,
            rows[..., : spec.rank],
            scale=spec.scale,
            mask=batch.mask,
        )
        for first in range(0, spec.num_heads, together)
    ]
    found = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
    return found.swapaxes(1, 2).reshape(tiles * tokens, spec.num_heads, spec.rank)
