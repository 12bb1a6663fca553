"""`vllmx_core.kv_dtypes` on MLX arrays: keys and values as 8-bit codes with a scale for each
vector."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
from vllmx_core.kv_dtypes import LIMITS

from vllmx_metal.fusion import fused

CODES: Mapping[str, mx.Dtype] = {"int8": mx.int8, "fp8": mx.uint8}
"""What codes are kept as; MLX has e4m3 as bytes."""


def quantise(x: mx.array, dtype: str) -> tuple[mx.array, mx.array]:
    """(..., D) float32 -> codes (..., D), scales (...)."""
    scaled, scale = _scaled(x, mx.abs(x).max(-1, keepdims=True), mx.array(LIMITS[dtype]))
    codes = mx.round(scaled).astype(mx.int8) if dtype == "int8" else mx.to_fp8(scaled)
    return codes, scale.squeeze(-1)


@fused
def _scaled(x: mx.array, greatest: mx.array, limit: mx.array) -> tuple[mx.array, mx.array]:
    """x with its greatest value at the limit, and what a code is worth."""
    finite = mx.isfinite(greatest)
    some = finite & (greatest > 1e-30)
    divisor = mx.where(some, greatest, 1.0)
    scaled = mx.where(finite, x, 0.0) * mx.where(some, limit / divisor, 0.0)
    return scaled, mx.where(some, divisor / limit, mx.where(finite, 0.0, mx.nan))


def dequantise(codes: mx.array, scales: mx.array) -> mx.array:
    """What `quantise` stands for, float32."""
    if codes.dtype == mx.uint8:
        return mx.from_fp8(codes, mx.float32) * scales[..., None]
    return codes.astype(mx.float32) * scales[..., None]
