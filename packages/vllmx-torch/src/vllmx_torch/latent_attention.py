"""Latent attention in plain torch: write this step's rows, gather each tile's context, attend with
all heads over the same rows. All of it is float32 but for the pages and the heads' matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from vllmx_core.ops.attention import rotate
from vllmx_core.ops.latent_attention import LatentSpec

from vllmx_torch.arrays import TORCH
from vllmx_torch.attention import Scratch
from vllmx_torch.indexer import picked_batches
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.step import AttentionBatch, TorchStep
from vllmx_torch.weights import LinearWeight

_SCORES = 1 << 24
"""Heads are attended together as far as their scores are no more than about so many."""


def latent_attention(
    q: Tensor,
    latent: Tensor,
    spec: LatentSpec,
    rope: Tensor,
    norm: Tensor,
    k_b: LinearWeight,
    v_b: LinearWeight,
    step: TorchStep,
    pages: LayerPages,
    scratch: Scratch,
    picked: Tensor | None = None,
) -> Tensor:
    """(T, H * (Dn + Dr)), (T, C + Dr) -> (T, H * Dv); see `LatentSpec` and `LatentAttention`."""
    table, rank, nope = rope[step.positions], spec.rank, spec.nope_size  # (T, Dr)
    turned = rotate(latent[:, None, rank:], table, interleaved=spec.interleaved, xp=TORCH)
    normed = TORCH.rms_norm(latent[:, None, :rank], norm, spec.norm_eps)
    pages.k.write(step.slots[pages.group], torch.cat([normed, turned], dim=2))
    heads = q.view(-1, spec.num_heads, nope + spec.rotary_dim)
    turned = rotate(heads[..., nope:], table, interleaved=spec.interleaved, xp=TORCH)
    queries = torch.cat([by_head(heads[..., :nope], k_b), turned], dim=2)  # (T, H, C + Dr)
    found = queries.new_empty(len(q), spec.num_heads, rank)
    batches = (
        step.batches(pages.group, 0, True)
        if picked is None
        else picked_batches(step, pages, picked)
    )
    for batch in batches:
        attended = _attend(queries[batch.tokens], batch, spec, pages, scratch)
        found.index_copy_(0, batch.tokens, attended)
    return by_head(found, v_b).reshape(len(q), -1)


def by_head(x: Tensor, stack: LinearWeight) -> Tensor:
    """x (T, H, in) times the matrix of each head -> (T, H, out) float32."""
    product = x.transpose(0, 1).to(stack.matrix.dtype) @ stack.matrix.mT  # (H, T, out)
    return product.transpose(0, 1).float()


def _attend(
    queries: Tensor, batch: AttentionBatch, spec: LatentSpec, pages: LayerPages, scratch: Scratch
) -> Tensor:
    """queries (N * Q, H, C + Dr) -> (N * Q, H, C)."""
    tiles, tokens, keys = batch.mask.shape
    rows = scratch.gather("k", pages.k, batch.slots)[0]  # (N, keys, C + Dr)
    values = rows[..., : spec.rank]
    queries = queries.view(tiles, tokens, spec.num_heads, -1).transpose(1, 2)  # (N, H, Q, C + Dr)
    together = max(1, _SCORES // (tiles * tokens * keys))
    found = []
    for some in queries.split(together, dim=1):
        flat = some.reshape(tiles, -1, spec.row_size)  # (N, h * Q, C + Dr)
        scores = (flat @ rows.mT).view(tiles, -1, tokens, keys) * spec.scale
        weights = scores.masked_fill(~batch.mask[:, None], -torch.inf).softmax(-1)
        answer = weights.view(tiles, -1, keys) @ values  # (N, h * Q, C)
        found.append(answer.view(tiles, -1, tokens, spec.rank))
    return torch.cat(found, dim=1).transpose(1, 2).reshape(tiles * tokens, spec.num_heads, -1)
