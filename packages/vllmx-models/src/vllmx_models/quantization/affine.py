"""Integers with a scale and a zero point for each group of input features, as float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.part import Span, WeightPart
from vllmx_core.weights.picks import decoded_entries

ROWS_AT_ONCE = 256
"""Rows that are unpacked together: their intermediate arrays stay in the cache."""


def decode_coded(part: WeightPart, first: int, last: int) -> F32:
    """`WeightPart.decode` of parts that have `coded`."""
    if len(part.shape) == 3:
        return decoded_entries(part, first, last)
    result = np.empty((last - first, part.shape[1]), np.float32)
    for begin in range(first, last, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, last)
        result[begin - first : end - first] = part.coded_rows(begin, end).to_f32()
    return result


def group_map(
    cols: int, group_size: int, given: AnyArray | None = None
) -> npt.NDArray[np.int32] | None:
    """(cols,) group of each input feature for `CodedRows`: as `given`, or `group_size` features
    after one another to a group; None where that comes out even."""
    in_order = np.arange(cols, dtype=np.int32) // np.int32(group_size)
    if given is not None and not np.array_equal(given, in_order):
        return given.astype(np.int32)
    return in_order if cols % group_size else None


def groups_between(cols: Span, count: int, group_size: int) -> Span | None:
    """The groups that these of `count` input features have in order; None where they begin or end
    within one, unless it is the only one."""
    begin, end = cols
    if group_size >= count:
        return 0, 1
    if begin % group_size or (end % group_size and end != count):
        return None
    return begin // group_size, -(-end // group_size)
