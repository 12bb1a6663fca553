"""Block types of 256 values with a scale for each 16 or 32 of them: Q2_K to Q6_K and IQ4_XS.

As in `legacy_blocks`: (N, bytes) in, (N, 256) float32 out, ggml's order of operations.
"""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import F32

from vllmx_models.formats.gguf.legacy_blocks import IQ4_LEVELS, Blocks, half, planes

VALUES = 256


def _grouped(codes: Blocks, group: int) -> F32:
    """(N, 256) -> (N, 256 / group, group)."""
    return codes.reshape(len(codes), -1, group).astype(np.float32)


def q2_k(blocks: Blocks) -> F32:
    """16 bytes scale | min << 4 | 64 bytes | f16 d | f16 dmin: d * scale * q - dmin * min."""
    scales, codes = blocks[:, :16], planes(blocks[:, 16:80], 32, 2)
    scale = half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    low = half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    return (scale[:, :, None] * _grouped(codes, 16) - low[:, :, None]).reshape(-1, VALUES)


def q3_k(blocks: Blocks) -> F32:
    """32 bytes of third bits | 64 bytes | 12 bytes of 6-bit scales | f16 d:
    d * (scale - 32) * (q - 4), q's third bit from the mask."""
    third = planes(blocks[:, :32], 32, 1) << np.uint8(2)
    codes = (planes(blocks[:, 32:96], 32, 2) | third).astype(np.int8) - np.int8(4)
    packed = blocks[:, 96:108]
    scales = planes(packed[:, :8], 8, 4) | planes(packed[:, 8:], 4, 2) << np.uint8(4)
    scale = half(blocks, 108) * (scales.astype(np.float32) - np.float32(32))
    values = codes.reshape(-1, 16, 16).astype(np.float32)
    return (scale[:, :, None] * values).reshape(-1, VALUES)


def _scales_and_minima(packed: Blocks) -> tuple[F32, F32]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima: the first four of each in the low six
    bits of bytes 0-3 and 4-7, the others split over bytes 8-11 and the spare high bits."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    mask, spare = np.uint8(0x3F), np.uint8(0x30)
    scales = (first & mask, rest & np.uint8(15) | first >> np.uint8(2) & spare)
    minima = (second & mask, rest >> np.uint8(4) | second >> np.uint8(2) & spare)
    return (
        np.concatenate(scales, axis=1).astype(np.float32),
        np.concatenate(minima, axis=1).astype(np.float32),
    )


def _scaled(blocks: Blocks, codes: Blocks) -> F32:
    """d * scale * q - dmin * min of Q4_K and Q5_K, whose blocks begin alike."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale, low = half(blocks, 0) * scales, half(blocks, 2) * minima
    return (scale[:, :, None] * _grouped(codes, 32) - low[:, :, None]).reshape(-1, VALUES)


def q4_k(blocks: Blocks) -> F32:
    """f16 d | f16 dmin | 12 bytes of scales and minima | 128 bytes."""
    return _scaled(blocks, planes(blocks[:, 16:], 32, 4))


def q5_k(blocks: Blocks) -> F32:
    """f16 d | f16 dmin | 12 bytes of scales and minima | 32 bytes of fifth bits | 128 bytes."""
    fifth = planes(blocks[:, 16:48], 32, 1) << np.uint8(4)
    return _scaled(blocks, planes(blocks[:, 48:], 32, 4) | fifth)


def q6_k(blocks: Blocks) -> F32:
    """128 bytes of low nibbles | 64 bytes of high pairs | 16 signed scales | f16 d:
    d * scale * (q - 32)."""
    high = planes(blocks[:, 128:192], 32, 2) << np.uint8(4)
    codes = (planes(blocks[:, :128], 64, 4) | high).astype(np.int8) - np.int8(32)
    scale = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values = codes.reshape(-1, 16, 16).astype(np.float32)
    return (scale[:, :, None] * values).reshape(-1, VALUES)


def iq4_xs(blocks: Blocks) -> F32:
    """f16 d | 2 bytes of high scale pairs | 4 bytes of low nibbles | 128 bytes:
    d * (scale - 32) * level[q]."""
    low = blocks[:, 4:8, None] >> np.array((0, 4), np.uint8) & np.uint8(15)
    high = blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    scales = low.reshape(-1, 8) | high.reshape(-1, 8) << np.uint8(4)
    scale = half(blocks, 0) * (scales.astype(np.float32) - np.float32(32))
    levels = IQ4_LEVELS[planes(blocks[:, 8:], 16, 4)].reshape(-1, 8, 32)
    return (scale[:, :, None] * levels).reshape(-1, VALUES)
