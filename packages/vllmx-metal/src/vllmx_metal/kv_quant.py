"""`vllmx_core.kv_dtypes` on MLX arrays: keys and values as 8-bit codes with a scale for each
vector."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
from vllmx_core.kv_dtypes import at_limit

from vllmx_metal.arrays import METAL

CODES: Mapping[str, mx.Dtype] = {"int8": mx.int8, "fp8": mx.uint8}
"""The types of stored codes; MLX has e4m3 as bytes."""


def quantise(x: mx.array, dtype: str) -> tuple[mx.array, mx.array]:
    """(..., D) float32 -> codes (..., D), scales (...)."""
    scaled, scale = at_limit(x, dtype, METAL)
    codes = mx.round(scaled).astype(mx.int8) if dtype == "int8" else mx.to_fp8(scaled)
    return codes, scale


def dequantise(codes: mx.array, scales: mx.array) -> mx.array:
    """The values that `quantise` coded, float32."""
    if codes.dtype == mx.uint8:
        return mx.from_fp8(codes, mx.float32) * scales[..., None]
    return codes.astype(mx.float32) * scales[..., None]
