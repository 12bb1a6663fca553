"""Codes of 2 to 8 bits as MLX packs them: a row is a string of bits, the first code lowest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """(rows, cols) -> (rows, cols * bits / 32); cols is a multiple of 32."""
    rows, cols = codes.shape
    if bits == 8:
        packed = np.ascontiguousarray(codes)
    elif bits in (2, 4):
        packed = np.zeros((rows, cols * bits // 8), np.uint8)
        for place in range(8 // bits):
            packed |= codes[:, place :: 8 // bits] << np.uint8(place * bits)
    else:  # eight codes fill `bits` bytes
        word = np.zeros((rows, cols // 8), np.uint64)
        for place in range(8):
            word |= codes[:, place::8].astype(np.uint64) << np.uint64(place * bits)
        octets = word.astype("<u8").view(np.uint8).reshape(rows, -1, 8)[..., :bits]
        packed = np.ascontiguousarray(octets).reshape(rows, -1)
    return packed.view("<u4")
