"""GGUF's blocks of 4-, 6- and 8-bit codes as codes with factors for each 32 or 16 values, for
`kernels/w4_codes.h`.

Q4_0, Q4_1 and Q8_0 are exactly that. Of Q4_K and Q6_K the factors, an f16 times 6 or 8 bits each,
are rounded to f16: by a part in 2,048 at most, an eighth of what bf16 activations are rounded by.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.weights import WeightPart

from vllmx_cuda.kernel_specs.gguf import BLOCKS, block_bytes
from vllmx_cuda.kernel_specs.w4 import MINIMA, ZERO_MIDDLE

U8 = npt.NDArray[np.uint8]
FORMS = {
    "q4_0": (4, ZERO_MIDDLE, 5), "q4_1": (4, MINIMA, 5), "q4_k": (4, MINIMA, 5),
    "q6_k": (6, ZERO_MIDDLE, 4), "q8_0": (8, ZERO_MIDDLE, 5),
}  # fmt: skip
"""Type -> bits, value of VX_ZERO, group_shift."""
_F16_MAX = 65504.0


def block_type(part: WeightPart) -> str | None:
    """A key of `FORMS`."""
    name = str(part.layout.options.get("type")).lower() if part.layout.kind == "gguf" else ""
    return name if name in FORMS else None


def coded_blocks(part: WeightPart, begin: int, end: int) -> tuple[U8, F32, F32 | None]:
    """Codes (n, cols), scales and minima (n, groups) of some rows.

    Raises:
        WeightFormatError: a factor is beyond float16.
    """
    name, (count, cols) = block_type(part), (end - begin, part.shape[1])
    assert name is not None, part.layout
    some = part.rows(begin, end)
    blocks = some.buffers["weight"].data.reshape(-1, block_bytes(BLOCKS[name]))
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
    for factors in (scales, minima):
        if factors is not None and not (abs(factors) <= _F16_MAX).all():
            raise WeightFormatError(
                f"tensor {part.name!r} has a scale or minimum of {abs(factors).max()}, beyond the"
                f" {_F16_MAX:.0f} of float16: the file is damaged"
            )
    some.drop_pages()
    groups = None if minima is None else minima.reshape(count, -1)
    return codes.reshape(count, cols), scales.reshape(count, -1), groups


def _nibbles(packed: U8, width: int) -> U8:
    """Each run of `width` bytes holds first the low halves of all its bytes, then the high ones."""
    words = np.ascontiguousarray(packed).view("<u8")
    runs = words.reshape(len(packed), -1, width // 8)
    halves = np.empty((*runs.shape[:2], 2, width // 8), np.uint64)
    mask = np.uint64(0x0F0F0F0F0F0F0F0F)
    halves[:, :, 0] = runs & mask
    halves[:, :, 1] = runs >> np.uint64(4) & mask
    return halves.reshape(len(packed), -1).view(np.uint8)


def _six_bits(low: U8, high: U8) -> U8:
    """(n, 256) codes: of each 128, 64 bytes hold the low nibbles and 32 the high pairs of bits."""
    nibbles, pairs = low.reshape(-1, 2, 2, 32), high.reshape(-1, 2, 32)
    codes = np.empty((len(low), 2, 4, 32), np.uint8)
    for quarter in range(4):
        codes[:, :, quarter] = pairs >> np.uint8(2 * quarter) & 3
    codes <<= np.uint8(4)
    codes[:, :, :2] |= nibbles & 15
    codes[:, :, 2:] |= nibbles >> np.uint8(4)
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
