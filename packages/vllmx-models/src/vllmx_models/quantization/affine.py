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
    rows: tuple[int, int, int],
    cols: int,
    scales: F32,
    zeros: AnyArray | None,
    group_of: npt.NDArray[np.int32] | None,
) -> F32:
    """(integer - zero) * scale, rounded once.

    Args:
        rows: (first, end, all): which rows of how many are wanted.
        scales: (rows or 1, groups), of all rows.
        zeros: integers of the same shape; None: 0.
        group_of: (cols,) group of each input feature; None: groups of equal size in order, which
            must divide cols.
    """
    first, last, count = rows
    groups = scales.shape[1]
    scales = np.broadcast_to(scales, (count, groups))
    zeros = None if zeros is None else np.broadcast_to(zeros, scales.shape)
    result = np.empty((last - first, cols), np.float32)
    for begin in range(first, last, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, last)
        out = result[begin - first : end - first]
        out[...] = codes(begin, end)
        for stored, apply in ((zeros, np.subtract), (scales, np.multiply)):
            if stored is None:
                continue
            operand = stored[begin:end].astype(np.float32, copy=False)
            if group_of is not None:
                apply(out, operand[:, group_of], out=out)
            else:
                grouped = out.reshape(end - begin, groups, -1)
                apply(grouped, operand[:, :, None], out=grouped)
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
