"""Super-blocks of 256 values: the inverse of `vllmx_models.formats.gguf.k_blocks`.

Each function takes (N, 256) finite float32 values and returns (N, bytes) blocks. First each group
gets a scale, then the super-block its float16 scales; the groups' small integer scales are chosen
by trying the neighbours of the nearest ones with the codes that each of them gives.
Arrays are (G, S, N): G values in each of S groups of N blocks.
"""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import F32

from vllmx_models.formats.gguf.k_blocks import VALUES
from vllmx_models.formats.gguf.legacy_blocks import Blocks
from vllmx_models.formats.gguf.quantize.legacy import half_bytes, join_planes
from vllmx_models.formats.gguf.quantize.search import (
    F16_MAX,
    affine,
    codes,
    f16,
    f16_not_below,
    inverse,
    spread,
    squared_error,
    symmetric,
)

_MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
"""The moves of a group's integer scale and minimum. The corners, and a second pass over both kinds
of scale, would take two thirds more time and lower the RMS error by half a percent."""


def _grouped(values: F32, group: int) -> F32:
    """(N, 256) -> (G, S, N), cut to what two scales can express; no zero has a sign."""
    limit = F16_MAX * np.float32(8)
    cut = np.clip(values, -limit, limit).reshape(len(values), -1, group)
    grouped: F32 = np.ascontiguousarray(cut.transpose(2, 1, 0))
    grouped += np.float32(0)
    return grouped


def _in_order(found: F32) -> Blocks:
    """(G, S, N) codes -> (N, 256)."""
    return np.ascontiguousarray(found.transpose(2, 1, 0).astype(np.uint8)).reshape(-1, VALUES)


def _neighbours(
    values: F32, small: tuple[F32, ...], large: tuple[F32, ...], limit: int, high: int
) -> tuple[F32, F32]:
    """The best small integers (scale, minimum), (S, N) each, of those around `small`, under the
    super-block's scales `large`."""
    best = tuple(part.copy() for part in small)
    least = np.full(small[0].shape, np.inf, np.float32)
    for moves in _MOVES:
        scale, low = (
            np.clip(part + np.float32(move), 0, limit)
            for part, move in zip(small, moves, strict=True)
        )
        minimum = low * large[1]
        step = scale * large[0]
        found = codes(values + minimum, inverse(step), 0, high)
        found *= step
        found -= minimum
        error = squared_error(values, found)
        better = error < least
        np.copyto(best[0], scale, where=better)
        np.copyto(best[1], low, where=better)
        np.copyto(least, error, where=better)
    return best[0], best[1]


def _affine(values: F32, high: int, limit: int, steps: F32) -> tuple[F32, F32, F32, F32, F32]:
    """(d, dmin) (N,), (scales, minima) (S, N), codes (G, S, N) of d * scale * q - dmin * min."""
    group, groups, count = values.shape
    flat = values.reshape(group, -1)
    scale, offset = affine(flat, high, steps, signed=False)
    scale = scale.reshape(groups, count)
    minimum = np.float32(0) - offset.reshape(groups, count)
    d = f16_not_below(scale.max(axis=0) / np.float32(limit))
    dmin = f16_not_below(minimum.max(axis=0) / np.float32(limit))
    scales = np.clip(np.rint(scale * inverse(d)), 0, limit)
    minima = np.clip(np.rint(minimum * inverse(dmin)), 0, limit)
    scales, minima = _neighbours(values, (scales, minima), (d, dmin), limit, high)

    def state(d: F32, dmin: F32) -> tuple[F32, ...]:
        found = codes(values + minima * dmin, inverse(scales * d), 0, high)
        return d, dmin, found

    first = state(d, dmin)
    second = state(*_refit(values, first[2] * scales, np.broadcast_to(minima, values.shape)))
    d, dmin, found = _better(
        values,
        (first, first[2] * (scales * first[0]) - minima * first[1]),
        (second, second[2] * (scales * second[0]) - minima * second[1]),
    )
    return d, dmin, scales, minima, found


def _better(
    values: F32,
    first: tuple[tuple[F32, ...], F32],
    second: tuple[tuple[F32, ...], F32],
) -> tuple[F32, ...]:
    """Chooses for each block one of two states by the smaller error of its approximation."""
    old, new = (squared_error(values, found).sum(axis=0) for _, found in (first, second))
    wins = new < old
    return tuple(np.where(wins, b, a) for a, b in zip(first[0], second[0], strict=True))


def _refit(values: F32, slope: F32, level: F32) -> tuple[F32, F32]:
    """(d, dmin) of least squares for values = d * slope - dmin * level, neither below 0."""
    axes = (0, 1)
    ss, ll = np.square(slope).sum(axis=axes), np.square(level).sum(axis=axes)
    sl = (slope * level).sum(axis=axes)
    sv, lv = (slope * values).sum(axis=axes), (level * values).sum(axis=axes)
    determinant = inverse(sl * sl - ss * ll)
    d = (sl * lv - sv * ll) * determinant
    dmin = (ss * lv - sl * sv) * determinant
    alone = sv * inverse(ss)
    usable = (d > 0) & (dmin > 0)
    return f16(np.where(usable, d, np.where(alone > 0, alone, 0))), f16(np.where(usable, dmin, 0))


def _symmetric(values: F32, high: int, limit: int, steps: F32) -> tuple[F32, F32, F32]:
    """d (N,), scales (S, N) in [-limit, limit), codes (G, S, N) in [-high - 1, high]."""
    group, groups, count = values.shape
    scale = symmetric(values.reshape(group, -1), -high - 1, high, steps).reshape(groups, count)
    extreme = np.take_along_axis(scale, np.abs(scale).argmax(axis=0)[None], axis=0)[0]
    d = f16_not_below(extreme / np.float32(-limit))
    scales = np.clip(np.rint(scale * inverse(d)), -limit, limit - 1)
    scales = _nearby(values, scales, d, limit, high)
    found = codes(values, inverse(scales * d), -high - 1, high)
    slope = found * scales
    fitted = f16((slope * values).sum(axis=(0, 1)) * inverse(np.square(slope).sum(axis=(0, 1))))
    again = codes(values, inverse(scales * fitted), -high - 1, high)
    d, found = _better(
        values,
        ((d, found), found * (scales * d)),
        ((fitted, again), again * (scales * fitted)),
    )
    return d, scales, found


def _nearby(values: F32, scales: F32, d: F32, limit: int, high: int) -> F32:
    """The best integer scale of each group among `scales` and their neighbours."""
    best, least = scales.copy(), np.full(scales.shape, np.inf, np.float32)
    for move in (0, -1, 1):
        candidate = np.clip(scales + np.float32(move), -limit, limit - 1)
        step = candidate * d
        found = codes(values, inverse(step), -high - 1, high)
        found *= step
        error = squared_error(values, found)
        better = error < least
        np.copyto(best, candidate, where=better)
        np.copyto(least, error, where=better)
    return best


def _bytes(parts: F32) -> Blocks:
    """(S, N) small integers -> (N, S)."""
    return np.ascontiguousarray(parts.T.astype(np.uint8))


def q2_k(values: F32) -> Blocks:
    d, dmin, scales, minima, found = _affine(_grouped(values, 16), 3, 15, spread(-0.6, 1.2, 7))
    packed = _bytes(scales) | _bytes(minima) << np.uint8(4)
    body = join_planes(_in_order(found), 32, 2)
    return np.concatenate((packed, body, half_bytes(d), half_bytes(dmin)), axis=1)


def q3_k(values: F32) -> Blocks:
    d, scales, found = _symmetric(_grouped(values, 16), 3, 32, spread(-0.9, 0.9, 10))
    in_order = _in_order(found + np.float32(4))
    small = _bytes(scales + np.float32(32))
    packed = (
        join_planes(small & np.uint8(15), 8, 4),
        join_planes(small >> np.uint8(4), 4, 2),
    )
    third = join_planes(in_order >> np.uint8(2), 32, 1)
    body = join_planes(in_order & np.uint8(3), 32, 2)
    return np.concatenate((third, body, *packed, half_bytes(d)), axis=1)


def _scales_and_minima(scales: F32, minima: F32) -> Blocks:
    """Eight 6-bit scales and minima in 12 bytes, as Q4_K and Q5_K hold them."""
    first, second = _bytes(scales), _bytes(minima)
    spare = np.uint8(0x30)
    return np.concatenate(
        (
            first[:, :4] | (first[:, 4:] & spare) << np.uint8(2),
            second[:, :4] | (second[:, 4:] & spare) << np.uint8(2),
            (first[:, 4:] & np.uint8(15)) | (second[:, 4:] & np.uint8(15)) << np.uint8(4),
        ),
        axis=1,
    )


def q4_k(values: F32) -> Blocks:
    d, dmin, scales, minima, found = _affine(_grouped(values, 32), 15, 63, spread(-1.4, 1.0, 5))
    head = half_bytes(d), half_bytes(dmin), _scales_and_minima(scales, minima)
    return np.concatenate((*head, join_planes(_in_order(found), 32, 4)), axis=1)


def q5_k(values: F32) -> Blocks:
    d, dmin, scales, minima, found = _affine(_grouped(values, 32), 31, 63, spread(-1.4, 0.8, 5))
    in_order = _in_order(found)
    fifth = join_planes(in_order >> np.uint8(4), 32, 1)
    body = join_planes(in_order & np.uint8(15), 32, 4)
    head = half_bytes(d), half_bytes(dmin), _scales_and_minima(scales, minima)
    return np.concatenate((*head, fifth, body), axis=1)


def q6_k(values: F32) -> Blocks:
    d, scales, found = _symmetric(_grouped(values, 16), 31, 128, spread(-0.9, 0.9, 7))
    in_order = _in_order(found + np.float32(32))
    low = join_planes(in_order & np.uint8(15), 64, 4)
    high = join_planes(in_order >> np.uint8(4), 32, 2)
    small = np.ascontiguousarray(scales.T.astype(np.int8)).view(np.uint8)
    return np.concatenate((low, high, small, half_bytes(d)), axis=1)
