"""Blocks of 32 values: the inverse of `vllmx_models.formats.gguf.legacy_blocks`.

Each function takes (N, 32) finite float32 values and gives (N, bytes) blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32

from vllmx_models.formats.gguf.legacy_blocks import Blocks
from vllmx_models.formats.gguf.quantize.search import (
    F16_MAX,
    affine,
    codes,
    f16,
    inverse,
    spread,
    squared_error,
    symmetric,
)

_E8M0_BIAS = 127
_MOST_E8M0 = 252
"""The greatest exponent with which the greatest level is finite."""
_E2M1_LEVELS = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)
_E2M1_BOUNDS = (_E2M1_LEVELS[1:] + _E2M1_LEVELS[:-1]) / 2


def half_bytes(values: F32) -> Blocks:
    """(N,) numbers that fit float16 -> (N, 2)."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def join_planes(values: Blocks, width: int, bits: int) -> Blocks:
    """The inverse of `planes`: (N, n) codes -> (N, n * bits / 8) bytes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    shifted = values.reshape(len(values), -1, 8 // bits, width) << shifts
    joined: Blocks = np.bitwise_or.reduce(shifted, axis=2)
    return joined.reshape(len(values), -1)


def _columns(values: F32, reach: int) -> F32:
    """(32, N), clipped to the range of float16 scales, without negative zeros, so that bytes do not
    depend on which zero a minimum returns."""
    limit = F16_MAX * np.float32(reach)
    columns: F32 = np.ascontiguousarray(np.clip(values, -limit, limit).T)
    columns += np.float32(0)
    return columns


def _symmetric(values: F32, low: int, high: int, count: int) -> tuple[F32, Blocks]:
    """Scales (N,) as float16 holds them and codes (N, 32) counted from `low`."""
    columns = _columns(values, high)
    plain = np.float32(1 / high) * np.abs(columns).max(axis=0)
    scale = f16(symmetric(columns, low, high, spread(-0.9, 0.9, count)))
    best = codes(columns, inverse(scale), low, high)
    least = squared_error(columns, best * scale)
    for other in (f16(plain), f16(scale * np.float32(1 + 2**-10))):
        found = codes(columns, inverse(other), low, high)
        error = squared_error(columns, found * other)
        better = error < least
        np.copyto(best, found, where=better)
        np.copyto(scale, other, where=better)
        np.copyto(least, error, where=better)
    return scale, np.ascontiguousarray((best.T - np.float32(low)).astype(np.uint8))


def _affine(values: F32, high: int, count: int) -> tuple[F32, F32, Blocks]:
    """Scales and offsets (N,) as float16 holds them and codes (N, 32)."""
    columns = _columns(values, 1)
    scale, offset = affine(columns, high, spread(-0.9, 0.9, count), signed=True)
    scale, offset = f16(scale), f16(offset)
    found = codes(columns - offset, inverse(scale), 0, high)
    return scale, offset, np.ascontiguousarray(found.T.astype(np.uint8))


def _five_bits(found: Blocks) -> tuple[Blocks, Blocks]:
    high = np.packbits(found >> np.uint8(4), axis=1, bitorder="little")
    return high, join_planes(found & np.uint8(15), 16, 4)


def q4_0(values: F32) -> Blocks:
    scale, found = _symmetric(values, -8, 7, 9)
    return np.concatenate((half_bytes(scale), join_planes(found, 16, 4)), axis=1)


def q4_1(values: F32) -> Blocks:
    scale, offset, found = _affine(values, 15, 9)
    parts = half_bytes(scale), half_bytes(offset), join_planes(found, 16, 4)
    return np.concatenate(parts, axis=1)


def q5_0(values: F32) -> Blocks:
    scale, found = _symmetric(values, -16, 15, 7)
    return np.concatenate((half_bytes(scale), *_five_bits(found)), axis=1)


def q5_1(values: F32) -> Blocks:
    scale, offset, found = _affine(values, 31, 7)
    return np.concatenate((half_bytes(scale), half_bytes(offset), *_five_bits(found)), axis=1)


def q8_0(values: F32) -> Blocks:
    """Codes in [-127, 127], as every kernel expects."""
    scale, found = _symmetric(values, -127, 127, 3)
    signed = (found.astype(np.int16) - 127).astype(np.int8).view(np.uint8)
    return np.concatenate((half_bytes(scale), signed), axis=1)


def mxfp4(values: F32) -> Blocks:
    """Uses the exponent with which the greatest value is between 4 and 8 times the scale, or the
    next one, whichever has the smaller error: the greatest level is 6."""
    _, power = np.frexp(np.abs(values).max(axis=1))  # below 2^power, at least half of it
    first = np.clip(power - 3 + _E8M0_BIAS, 0, _MOST_E8M0 - 1)
    found = [_e2m1(values, first + more) for more in (0, 1)]
    errors = [np.square(made.astype(np.float64) - values).sum(axis=1) for _, made in found]
    second = (errors[1] < errors[0])[:, None]
    codes4 = np.where(second, found[1][0], found[0][0])
    exponent = np.where(second[:, 0], first + 1, first).astype(np.uint8)
    return np.concatenate((exponent[:, None], join_planes(codes4, 16, 4)), axis=1)


def _e2m1(values: F32, exponent: npt.NDArray[np.int32]) -> tuple[Blocks, F32]:
    """The nearest levels with these exponents: codes (N, 32), and their values."""
    scale = np.ldexp(np.float32(1), exponent - _E8M0_BIAS)[:, None]  # (N, 1)
    with np.errstate(over="ignore"):
        scaled = np.abs(values) / scale
    level = np.searchsorted(_E2M1_BOUNDS, scaled).astype(np.uint8)
    made = np.copysign(_E2M1_LEVELS[level] * scale, values).astype(np.float32)
    negative = np.signbit(values) & (level > 0)  # no zero has a sign
    return level | np.where(negative, 8, 0).astype(np.uint8), made
