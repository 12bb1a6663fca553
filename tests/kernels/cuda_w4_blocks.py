"""GGUF's blocks in the order of `kernels/w4_codes.h` as numpy puts them there: the oracle of
w4_repack_blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.weights.part import WeightPart
from vllmx_cuda.matrices.w4_gguf import block_type
from vllmx_cuda.matrices.w4_packing import packed, packing_of

U8 = npt.NDArray[np.uint8]
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q4_k": 144, "q6_k": 210, "q8_0": 34}


def packed_blocks(part: WeightPart) -> U8:
    """(row tiles, bytes) of a whole part."""
    packing = packing_of(part)
    assert packing is not None
    return packed(*coded_blocks(part), packing)


def coded_blocks(part: WeightPart) -> tuple[U8, F32, F32 | None]:
    """Codes (rows, cols), scales and minima (rows, groups)."""
    name, (count, cols) = block_type(part), part.shape
    assert name is not None, part.layout
    blocks = part.buffers["weight"].data.reshape(-1, BLOCK_BYTES[name])
    minima: F32 | None = None
    if name == "q4_k":
        codes = _nibbles(blocks[:, 16:], 32)
        scales, minima = _factors_of_k(blocks)
    elif name == "q6_k":
        codes = _six_bits(blocks[:, :128], blocks[:, 128:192])
        scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    elif name == "q8_0":  # signed: 128 becomes their zero
        codes, scales = blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0)
    else:
        codes, scales = _nibbles(blocks[:, 2 if name == "q4_0" else 4 :], 16), _half(blocks, 0)
        minima = None if name == "q4_0" else _half(blocks, 2)
    groups = None if minima is None else minima.reshape(count, -1)
    return codes.reshape(count, cols), scales.reshape(count, -1), groups


def _nibbles(packed: U8, width: int) -> U8:
    """Each run of `width` bytes holds first the low halves of all its bytes, then the high ones."""
    runs = packed.reshape(len(packed), -1, width)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1)


def _six_bits(low: U8, high: U8) -> U8:
    """(n, 256) codes: of each 128, 64 bytes hold the low nibbles and 32 the high pairs of bits."""
    nibbles, pairs = low.reshape(-1, 2, 2, 32), high.reshape(-1, 2, 32)
    codes = np.empty((len(low), 2, 4, 32), np.uint8)
    for quarter in range(4):
        codes[:, :, quarter] = (pairs >> 2 * quarter & 3) << 4
    codes[:, :, :2] |= nibbles & 15
    codes[:, :, 2:] |= nibbles >> 4
    return codes.reshape(len(low), -1)


def _half(blocks: U8, at: int) -> F32:
    """(n, 1) the f16 at byte `at`."""
    found: F32 = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    return found


def _factors_of_k(blocks: U8) -> tuple[F32, F32]:
    """(n, 8) scales and minima: 6 bits each of bytes 4 to 16, of the last four in two places."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima
