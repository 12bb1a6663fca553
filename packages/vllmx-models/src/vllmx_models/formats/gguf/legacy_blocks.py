"""Block types of 32 values with one scale: Q4_0 to Q8_0, IQ4_NL and MXFP4.

Each function takes (N, bytes) blocks as stored in the file and returns (N, 32) float32, bit for bit
the same as ggml by the same order of operations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32

Blocks = npt.NDArray[np.uint8]

IQ4_LEVELS = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)
_E2M1_DOUBLED = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)


def half(blocks: Blocks, at: int) -> F32:
    """(N, 1) float16 numbers that begin at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def planes(codes: Blocks, width: int, bits: int) -> Blocks:
    """Unpacks codes of `bits` bits. Each run of `width` bytes holds 8 / bits planes: first the
    lowest bits of all its bytes, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    unpacked = codes.reshape(len(codes), -1, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return unpacked.reshape(len(codes), -1)


def q4_0(blocks: Blocks) -> F32:
    """f16 d | 16 bytes: d * (q - 8)."""
    return half(blocks, 0) * (planes(blocks[:, 2:], 16, 4).astype(np.float32) - np.float32(8))


def q4_1(blocks: Blocks) -> F32:
    """f16 d | f16 m | 16 bytes: d * q + m."""
    return half(blocks, 0) * planes(blocks[:, 4:], 16, 4).astype(np.float32) + half(blocks, 2)


def _five_bits(high: Blocks, low: Blocks) -> F32:
    """Bit i of the four `high` bytes is the fifth bit of value i."""
    fifth = np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return (planes(low, 16, 4) | fifth).astype(np.float32)


def q5_0(blocks: Blocks) -> F32:
    """f16 d | 4 bytes of fifth bits | 16 bytes: d * (q - 16)."""
    return half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.float32(16))


def q5_1(blocks: Blocks) -> F32:
    """f16 d | f16 m | 4 bytes of fifth bits | 16 bytes: d * q + m."""
    return half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + half(blocks, 2)


def q8_0(blocks: Blocks) -> F32:
    """f16 d | 32 signed bytes: d * q."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks, 0)


def iq4_nl(blocks: Blocks) -> F32:
    """f16 d | 16 bytes: d * level[q]."""
    return half(blocks, 0) * IQ4_LEVELS[planes(blocks[:, 2:], 16, 4)]


def mxfp4(blocks: Blocks) -> F32:
    """E8M0 exponent e | 16 bytes of E2M1: 2^(e - 127) * value."""
    exponent = blocks[:, :1].astype(np.uint32)
    tiny = np.uint32(0x00200000) << np.minimum(exponent, 1)  # 2^-128 and 2^-127 are subnormal
    half_scale = np.where(exponent < 2, tiny, exponent - np.uint32(1) << np.uint32(23))
    return half_scale.view(np.float32) * _E2M1_DOUBLED[planes(blocks[:, 1:], 16, 4)]
