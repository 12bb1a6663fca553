"""Attention within the rows of a step, both ways and without pages."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.ops.attention import rotate
from vllmx_core.ops.segment_attention import SegmentSpec, segments

from vllmx_torch.arrays import TORCH
from vllmx_torch.step import TorchStep


def segment_attention(
    qkv: Tensor, spec: SegmentSpec, rope: Tensor | None, step: TorchStep
) -> Tensor:
    """(T, (H + 2K) * D) -> (T, H * D); see `SegmentSpec`."""
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
            attn_mask=_window(end - start, spec.window, q.device),
            scale=spec.scale,
            enable_gqa=heads != kv_heads,
        )
    return out.transpose(0, 1).reshape(-1, heads * size)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(n, n) True where a token sees another; None: everywhere."""
    if window is None or window >= length:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window
