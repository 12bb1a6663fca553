"""Layouts whose weights are integers with a scale and a zero for each group of input features, and
integers of 2 to 8 bits in 32-bit words."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.part import Layout, Span, StoredPart

U8 = npt.NDArray[np.uint8]
ROWS_AT_ONCE = 256
"""Rows that are unpacked together, so that their intermediate arrays stay in the cache."""


class CodedLayout(Layout):
    """A layout with `codes`; float32 is made of them."""

    has_codes: ClassVar[bool] = True

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        result = np.empty((end - begin, part.shape[1]), np.float32)
        for first in range(begin, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            result[first - begin : last - begin] = part.coded_rows(first, last).to_f32()
        return result


class PackedLayout(CodedLayout):
    """A coded layout whose buffers do not lie row by row."""

    @property
    def row_wise(self) -> bool:
        return False


def group_map(
    cols: int, group_size: int, given: AnyArray | None = None
) -> npt.NDArray[np.int32] | None:
    """Returns the (cols,) group of each input feature for `CodedRows`: `given`, or groups of
    `group_size` in order; None where all groups are of one size and in order."""
    in_order = np.arange(cols, dtype=np.int32) // np.int32(group_size)
    if given is not None and not np.array_equal(given, in_order):
        return given.astype(np.int32)
    return in_order if cols % group_size else None


def groups_between(cols: Span, count: int, group_size: int) -> Span | None:
    """Returns the groups of some of `count` input features, which are in order; None where a group
    would be cut in two, unless it is the only one."""
    begin, end = cols
    if group_size >= count:
        return 0, 1
    if begin % group_size or (end % group_size and end != count):
        return None
    return begin // group_size, -(-end // group_size)


def packed_words(count: int, bits: int) -> int:
    """Words that hold `count` integers."""
    return -(-count * bits // 32)


def unpack(words: npt.NDArray[np.int32], bits: int, count: int) -> U8:
    """(n, count) integers out of (n, w) words: the i-th of a row starts at bit i * bits of the
    row's bits, least significant first, so that it may lie in two words."""
    data = np.ascontiguousarray(words).view(np.uint8)  # (n, 4w)
    if bits == 8:
        return data[:, :count]
    if bits in (2, 4):
        per_byte = 8 // bits
        mask = np.uint8((1 << bits) - 1)
        values = np.empty((*data.shape, per_byte), np.uint8)
        for index in range(per_byte):
            np.bitwise_and(data >> np.uint8(index * bits), mask, out=values[..., index])
        return values.reshape(len(data), -1)[:, :count]
    starts = np.arange(count) * bits
    first, shift = starts >> 3, (starts & 7).astype(np.uint16)
    padded = np.pad(data, ((0, 0), (0, 1))).astype(np.uint16)
    window = padded[:, first] | padded[:, first + 1] << np.uint16(8)
    return ((window >> shift) & np.uint16((1 << bits) - 1)).astype(np.uint8)
