"""Scales of small groups of values by search.

Arrays are group-major, (G, M): the G values of each of M groups run down a column, so that every
operation works on long rows. Each candidate scale is followed by its least-squares optimum for the
codes that it gives; what counts is the squared error against the values. No weights: the result is
meant to have the least RMS error, whatever the activations will be.
"""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import F32

F16_MAX = np.float32(65504)


def f16(values: F32) -> F32:
    """The values as a float16 would hold them, the largest finite one instead of infinity."""
    return np.clip(values, -F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)


def f16_not_below(values: F32) -> F32:
    """The nearest float16 that is no smaller in magnitude: what was divided by it stays within its
    bounds, also where the spacing of float16 is wide."""
    nearest = np.clip(values, -F16_MAX, F16_MAX).astype(np.float16)
    away = np.nextafter(nearest, np.copysign(np.float16(65504), nearest))
    short = np.abs(nearest.astype(np.float32)) < np.abs(values)
    signed = np.where(nearest == 0, np.copysign(away, values), away)
    return np.where(short, signed, nearest).astype(np.float32)


def inverse(scales: F32) -> F32:
    """1 / scale; 0 for 0."""
    result: F32 = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=result, where=np.abs(scales) > 1e-30)
    return result


def codes(values: F32, inverses: F32, low: int, high: int) -> F32:
    """round(value / scale) within [low, high]; the best codes for a given scale."""
    scaled = values * inverses
    np.rint(scaled, out=scaled)
    return np.clip(scaled, low, high, out=scaled)


def squared_error(values: F32, approximation: F32) -> F32:
    """(M,) sums over each group; `approximation` is overwritten."""
    np.subtract(approximation, values, out=approximation)
    np.multiply(approximation, approximation, out=approximation)
    total: F32 = approximation.sum(axis=0)
    return total


def symmetric(values: F32, low: int, high: int, steps: F32) -> F32:
    """Scales d, (M,), for value = d * q with q in [low, high], low = -high - 1 or -high.

    Each pair of candidates maps the value of the greatest magnitude to `low` + step and to
    `high` - step; d gets the sign that this needs.
    """
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=0)[None], axis=0)[0]  # (M,)
    unit = inverse(extreme)
    best: F32 = np.zeros_like(extreme)
    least: F32 = np.square(values).sum(axis=0)
    ends = (low, high) if low != -high else (high,)
    for step in steps:
        for end in ends:
            target = np.float32(end) - step if end > 0 else np.float32(end) + step
            found = codes(values, unit * target, low, high)
            squares = np.square(found).sum(axis=0)
            scale = (found * values).sum(axis=0) * inverse(squares)
            found *= scale
            error = squared_error(values, found)
            better = error < least
            np.copyto(best, scale, where=better)
            np.copyto(least, error, where=better)
    return best


def affine(values: F32, high: int, steps: F32, *, signed: bool, rounds: int = 2) -> tuple[F32, F32]:
    """(d, m), (M,) each, for value = d * q + m with q in [0, high]; d >= 0.

    `signed`: m may have any sign, else it is at most 0. The search over the range of the codes is
    refined by `rounds` of rounding and least squares in turn.
    """
    count = np.float32(len(values))
    bottom, total = values.min(axis=0), values.sum(axis=0)  # (M,)
    if not signed:
        bottom = np.minimum(bottom, 0)
    width = values.max(axis=0) - bottom
    unit = inverse(width)
    scale, offset = np.zeros_like(width), bottom.copy()
    least = squared_error(values, np.broadcast_to(bottom, values.shape).copy())
    constant = total / count if signed else np.minimum(total / count, 0)
    error = squared_error(values, np.broadcast_to(constant, values.shape).copy())
    np.copyto(offset, constant, where=error < least)
    np.copyto(least, error, where=error < least)

    def consider(inverses: F32, start: F32) -> None:
        found = codes(values - start, inverses, 0, high)
        linear, squares = found.sum(axis=0), np.square(found).sum(axis=0)
        product = (found * values).sum(axis=0)
        new_scale = (count * product - total * linear) * inverse(count * squares - linear * linear)
        new_offset = (total - new_scale * linear) / count
        if not signed:
            through_zero = new_offset > 0
            np.copyto(new_scale, product * inverse(squares), where=through_zero)
            np.copyto(new_offset, np.float32(0), where=through_zero)
        found *= new_scale
        found += new_offset
        error = squared_error(values, found)
        better = (error < least) & (new_scale > 0)
        np.copyto(scale, new_scale, where=better)
        np.copyto(offset, new_offset, where=better)
        np.copyto(least, error, where=better)

    for step in steps:
        consider(unit * np.float32(high + step), bottom)
    for _ in range(rounds):
        consider(inverse(scale), offset.copy())
    return scale, offset


def spread(first: float, last: float, count: int) -> F32:
    """`count` equal steps from first to last."""
    return np.linspace(first, last, count, dtype=np.float32)
