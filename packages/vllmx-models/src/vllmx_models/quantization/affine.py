"""Integers with a scale and a zero point for each group of input features, as float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, AnyArray

ROWS_AT_ONCE = 256
"""Rows that are unpacked together: their intermediate arrays stay in the cache."""

Codes = Callable[[int, int], AnyArray]
"""codes(begin, end): the integers of these rows, (rows, cols)."""


def decode_affine(
    codes: Codes,
    shape: tuple[int, int],
    scales: F32,
    zeros: AnyArray | None,
    group_of: npt.NDArray[np.int32] | None,
) -> F32:
    """(integer - zero) * scale, rounded once.

    Args:
        shape: (rows, cols).
        scales: (rows or 1, groups).
        zeros: integers of the same shape; None: 0.
        group_of: (cols,) group of each input feature; None: groups of equal size in order, which
            must divide cols.
    """
    rows = shape[0]
    groups = scales.shape[1]
    scales = np.broadcast_to(scales, (rows, groups))
    offsets = None if zeros is None else np.broadcast_to(zeros, scales.shape).astype(np.float32)
    result = np.empty(shape, np.float32)
    for begin in range(0, rows, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, rows)
        out = result[begin:end]
        out[...] = codes(begin, end)
        for operand, apply in ((offsets, np.subtract), (scales, np.multiply)):
            if operand is None:
                continue
            if group_of is not None:
                apply(out, operand[begin:end, group_of], out=out)
            else:
                grouped = out.reshape(end - begin, groups, -1)
                apply(grouped, operand[begin:end, :, None], out=grouped)
    return result


def group_map(
    cols: int, group_size: int, given: AnyArray | None = None
) -> npt.NDArray[np.int32] | None:
    """(cols,) group of each input feature for `decode_affine`: as `given`, or `group_size` features
    after one another to a group; None where that comes out even."""
    in_order = np.arange(cols, dtype=np.int32) // np.int32(group_size)
    if given is not None and not np.array_equal(given, in_order):
        return given.astype(np.int32)
    return in_order if cols % group_size else None
