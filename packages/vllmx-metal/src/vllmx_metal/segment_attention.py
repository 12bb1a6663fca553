"""Attention within the rows of a step or the windows of its images, both ways and without pages."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
from vllmx_core.ops.attention import rotate_by
from vllmx_core.ops.segment_attention import SegmentSpec, segments

from vllmx_metal.arrays import METAL
from vllmx_metal.step import MetalStep


def segment_attention(
    qkv: mx.array, spec: SegmentSpec, rope: mx.array | None, step: MetalStep
) -> mx.array:
    """(T, (H + 2K) * D) -> (T, H * D); see `SegmentSpec`."""
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
            mask=_window(end - start, spec.window),
        )[0].swapaxes(0, 1)  # (n, H, D)
        for start, end in pairwise(segments(spec, step.plan))
        if end > start
    ]
    return mx.concatenate(outs).reshape(-1, heads * size)


def _window(length: int, window: int | None) -> mx.array | None:
    """(n, n) True where a token sees another; None: everywhere."""
    if window is None or window >= length:
        return None
    places = np.arange(length)
    return mx.array(np.abs(places[:, None] - places) < window)
