"""Attention in plain torch: over pages (write this step's keys and values, gather each tile's
context, attend), and within the rows of a step without pages. All of it is float32 but for the
pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.ops.attention import AttentionSpec, AttentionWeights, bias_of, normed, rotate
from vllmx_core.ops.head import softcap
from vllmx_core.ops.segment_attention import SegmentSpec, bias_between, segments

from vllmx_torch.arrays import TORCH
from vllmx_torch.kv_cache import LayerPages, Pages, values
from vllmx_torch.step import AttentionBatch, TorchStep


@dataclass(slots=True)
class Scratch:
    """Buffers for gathered context, kept from layer to layer: megabytes that malloc gives back and
    asks for again cost more in page faults than the copy into them."""

    _buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    def gather(self, name: str, pages: Pages, slots: Tensor) -> Tensor:
        """slots (N, C) -> (K, N, C, D) float32, good until the next call with this name."""
        data, flat = pages.data, slots.flatten()
        kv_heads, _, size = data.shape
        shape = (kv_heads, slots.numel(), size)
        gathered = self._take(name, shape, data.dtype, data.device)
        torch.index_select(data, 1, flat, out=gathered)
        if data.dtype != torch.float32:
            stored = gathered if pages.scales is None else values(gathered, pages.dtype)
            gathered = self._take(name, stored.shape, torch.float32, data.device).copy_(stored)
        if pages.scales is not None:
            gathered.mul_(pages.scales[:, flat, None])
        return gathered.view(kv_heads, *slots.shape, -1)

    def _take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        key, values = (name, dtype), math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < values:
            self._buffers[key] = torch.empty(values, dtype=dtype, device=device)
        return self._buffers[key][:values].view(shape)


def attention(
    qkv: Tensor,
    spec: AttentionSpec,
    weights: AttentionWeights[Tensor],
    step: TorchStep,
    pages: LayerPages,
    scratch: Scratch,
) -> Tensor:
    """(T, (H + 2K) * D) -> (T, H * D); see `AttentionSpec`."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    split = qkv.view(-1, spec.num_heads_in, size)  # (T, H + 2K, D)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if not spec.norm_last:
        q, k = normed(q, k, spec, weights, TORCH)
    if weights.rope is not None:
        table = step.rotations(weights.rope, spec.rope_axes)
        q = rotate(q, table, interleaved=spec.interleaved, xp=TORCH)
        k = rotate(k, table, interleaved=spec.interleaved, xp=TORCH)
    if spec.norm_last:
        q, k = normed(q, k, spec, weights, TORCH)
    out = paged_attention(q, k, v, spec, weights.sinks, step, pages, scratch, weights.bias)
    return out.view(-1, heads * size)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    step: TorchStep,
    pages: LayerPages,
    scratch: Scratch,
    bias: Tensor | None = None,
) -> Tensor:
    """Writes keys and values (T, K, D) to the pages, unless the layer shares them, and attends:
    q (T, H, D) -> (T, H, D), all float32."""
    if not spec.shared:
        pages.k.write(step.slots[pages.group], k)
        pages.v.write(step.slots[pages.group], v)
    q = pages.k.turned(q)
    out = torch.empty_like(q)  # (T, H, D)
    for batch in step.batches(pages.group, spec.reach, spec.causal, spans=spec.spans):
        added = None if bias is None else _bias_of(bias, spec, batch, step.positions)
        attended = _attend(q[batch.tokens], batch, spec, sinks, pages, scratch, added)
        out.index_copy_(0, batch.tokens, attended)
    return pages.v.turned(out)


def _bias_of(bias: Tensor, spec: AttentionSpec, batch: AttentionBatch, positions: Tensor) -> Tensor:
    """(K, N, G, Q, C) what is added to the scores of a batch."""
    assert batch.keys is not None, "picked keys have no bias"
    places = positions[batch.tokens].view(len(batch.keys), -1, 1)
    added = bias_of(bias, spec.num_heads, batch.keys[:, None] - places)  # (N, Q, C, H)
    found: Tensor = added.unflatten(-1, (spec.num_kv_heads, -1)).permute(3, 0, 4, 1, 2)
    return found


def _attend(
    q: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    sinks: Tensor | None,
    pages: LayerPages,
    scratch: Scratch,
    bias: Tensor | None,
) -> Tensor:
    """q (N * Q, H, D) -> (N * Q, H, D)."""
    tiles, queries, _ = batch.mask.shape
    kv_heads, size = spec.num_kv_heads, spec.head_size
    group = spec.num_heads // kv_heads
    # Query heads of one kv head become more queries of it: (K, N, G * Q, D)
    q = q.view(tiles, queries, kv_heads, group, size).permute(2, 0, 3, 1, 4)
    q = q.reshape(kv_heads, tiles, group * queries, size)
    keys = scratch.gather("k", pages.k, batch.slots)  # (K, N, C, D)
    values = scratch.gather("v", pages.v, batch.slots)  # (K, N, C, D)
    scores: Tensor = softcap((q @ keys.mT) * spec.scale, spec.softcap, TORCH)  # (K, N, G * Q, C)
    scores = scores.view(kv_heads, tiles, group, queries, -1)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~batch.mask[:, None], -torch.inf)
    if sinks is not None:
        by_head = sinks.view(kv_heads, 1, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, by_head], dim=-1)
    weights = scores.softmax(-1)[..., : batch.mask.shape[-1]]
    out = weights.reshape(kv_heads, tiles, group * queries, -1) @ values
    out = out.view(kv_heads, tiles, group, queries, size).permute(1, 3, 0, 2, 4)
    return out.reshape(tiles * queries, spec.num_heads, size)


def segment_attention(
    qkv: Tensor,
    spec: SegmentSpec,
    rope: Tensor | None,
    step: TorchStep,
    bias: Tensor | None = None,
) -> Tensor:
    """(T, (H + 2K) * D) -> (T, H * D); see `SegmentSpec` and `SegmentAttention`."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, size).split([heads, kv_heads, kv_heads], dim=1)
    if rope is not None:
        table = step.rotations(rope, spec.rope_axes)
        q = rotate(q, table, interleaved=spec.interleaved, xp=TORCH)
        k = rotate(k, table, interleaved=spec.interleaved, xp=TORCH)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (heads, T, D)
    out = torch.empty((heads, *k.shape[1:]), device=q.device)  # (H, T, D)
    for start, end in pairwise(segments(spec, step.plan)):
        out[:, start:end] = functional.scaled_dot_product_attention(
            q[:, start:end],
            k[:, start:end],
            v[:, start:end],
            attn_mask=_added(end - start, spec, q, bias),
            scale=spec.scale,
            enable_gqa=heads != kv_heads,
        )
    return out.transpose(0, 1).reshape(-1, heads * size)


def _added(length: int, spec: SegmentSpec, q: Tensor, bias: Tensor | None) -> Tensor | None:
    """The window, or with a bias (H, n, n) what is added to scores; None: nothing."""
    seen = _window(length, spec.window, q.device)
    if bias is None:
        return seen
    added: Tensor = bias_between(bias, spec.num_heads, length, TORCH).to(q.dtype)
    return added if seen is None else added.masked_fill(~seen, -torch.inf)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(n, n) True where a token sees another; None: everywhere."""
    if window is None or window >= length:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window
