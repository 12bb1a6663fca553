"""Integers of 2 to 8 bits out of 32-bit words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


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
