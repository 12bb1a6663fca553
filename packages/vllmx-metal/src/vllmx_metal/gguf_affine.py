"""GGUF's blocks as integers with a scale and a bias for each 32 values, which is what MLX
multiplies: weight = code * scale + bias.

Exactly the values of the file: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K with as many bits as
they have, IQ4_NL and IQ4_XS, whose levels are integers, with 8 (IQ4_XS within float32's rounding).

Q6_K and Q3_K have a scale for each 16 values. Two more bits make a grid for both halves of 32: its
step is a quarter of the larger scale, so that half is exact and the other is rounded to an eighth
of the larger scale at the most. Q2_K, whose 16 values have a minimum as well, goes to the 16 levels
between the least and the greatest of 32.

Functions take (N, bytes) blocks and give codes (N, values), scales and biases (N, values / 32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32

U8 = npt.NDArray[np.uint8]
Affine = tuple[U8, F32, F32]
GROUP = 32
_IQ4_LEVELS = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int16
)
_IQ4_CODES = (_IQ4_LEVELS + 127).astype(np.uint8)


def _half(blocks: U8, at: int) -> F32:
    """(N, 1) the float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _planes(packed: U8, width: int, bits: int) -> U8:
    """Codes of `bits` bits: each run of `width` bytes holds first the lowest bits of all its bytes,
    then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = packed.reshape(len(packed), -1, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _five_bits(high: U8, low: U8) -> U8:
    fifth = np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return _planes(low, 16, 4) | fifth


def _q4_0(blocks: U8) -> Affine:
    scale = _half(blocks, 0)
    return _planes(blocks[:, 2:], 16, 4), scale, -8 * scale


def _q4_1(blocks: U8) -> Affine:
    return _planes(blocks[:, 4:], 16, 4), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: U8) -> Affine:
    scale = _half(blocks, 0)
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]), scale, -16 * scale


def _q5_1(blocks: U8) -> Affine:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: U8) -> Affine:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), scale, -128 * scale  # two's complement plus 128


def _iq4_nl(blocks: U8) -> Affine:
    scale = _half(blocks, 0)
    return _IQ4_CODES[_planes(blocks[:, 2:], 16, 4)], scale, -127 * scale


def _scales_and_minima(blocks: U8) -> tuple[F32, F32]:
    """(N, 8) d * scale and -dmin * minimum of Q4_K and Q5_K, 6 bits each in bytes 4 to 16."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    low, spare = np.uint8(63), np.uint8(48)
    scales = np.concatenate([first & low, rest & np.uint8(15) | first >> np.uint8(2) & spare], 1)
    minima = np.concatenate(
        [second & low, rest >> np.uint8(4) | second >> np.uint8(2) & spare], axis=1
    )
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: U8) -> Affine:
    return _planes(blocks[:, 16:], 32, 4), *_scales_and_minima(blocks)


def _q5_k(blocks: U8) -> Affine:
    fifth = _planes(blocks[:, 16:48], 32, 1) << np.uint8(4)
    return _planes(blocks[:, 48:], 32, 4) | fifth, *_scales_and_minima(blocks)


def _iq4_xs(blocks: U8) -> Affine:
    low = blocks[:, 4:8, None] >> np.array((0, 4), np.uint8) & np.uint8(15)
    high = blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    scales = low.reshape(-1, 8) | high.reshape(-1, 8) << np.uint8(4)
    scale = _half(blocks, 0) * (scales.astype(np.float32) - np.float32(32))
    return _IQ4_CODES[_planes(blocks[:, 8:], 16, 4)], scale, np.float32(-127) * scale


def _q6_k(blocks: U8) -> Affine:
    high = _planes(blocks[:, 128:192], 32, 2) << np.uint8(4)
    codes = (_planes(blocks[:, :128], 64, 4) | high).astype(np.int8) - np.int8(32)
    return _halves_on_one_grid(codes, _half(blocks, 208), blocks[:, 192:208].view(np.int8), 8)


def _q3_k(blocks: U8) -> Affine:
    third = _planes(blocks[:, :32], 32, 1) << np.uint8(2)
    codes = (_planes(blocks[:, 32:96], 32, 2) | third).astype(np.int8) - np.int8(4)
    packed = blocks[:, 96:108]
    scales = _planes(packed[:, :8], 8, 4) | _planes(packed[:, 8:], 4, 2) << np.uint8(4)
    return _halves_on_one_grid(codes, _half(blocks, 108), scales.astype(np.int8) - np.int8(32), 5)


def _halves_on_one_grid(
    codes: npt.NDArray[np.int8], scale: F32, factors: npt.NDArray[np.int8], bits: int
) -> Affine:
    """codes (N, 256) signed; scale (N, 1) times factors (N, 16) are the scales of 16 values."""
    pairs = factors.reshape(len(codes), -1, 2).astype(np.float32)
    larger = np.where(
        np.abs(pairs[..., :1]) >= np.abs(pairs[..., 1:]), pairs[..., :1], pairs[..., 1:]
    )
    share = np.divide(pairs, larger, out=np.zeros_like(pairs), where=larger != 0)
    middle = 1 << (bits - 1)
    fine = np.rint(codes.reshape(len(codes), -1, 2, 16) * (4 * share[..., None])) + middle
    step: F32 = (scale * larger[..., 0] / 4).astype(np.float32)
    packed: U8 = np.clip(fine, 0, 2 * middle - 1).astype(np.uint8)
    return packed.reshape(len(codes), -1), step, -middle * step


def _q2_k(blocks: U8) -> Affine:
    packed = blocks[:, :16]
    scale = _half(blocks, 80) * (packed & np.uint8(15))
    low = _half(blocks, 82) * (packed >> np.uint8(4))
    codes = _planes(blocks[:, 16:80], 32, 2).reshape(len(blocks), 16, 16)
    values = (scale[:, :, None] * codes - low[:, :, None]).reshape(len(blocks), -1, GROUP)
    least = values.min(-1)
    step = (values.max(-1) - least) / 15
    over = np.where(step == 0, 1, step)[..., None]
    fine: U8 = np.rint((values - least[..., None]) / over).astype(np.uint8)
    return fine.reshape(len(blocks), -1), step.astype(np.float32), least


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A type of GGUF's: `num_bytes` for `values` numbers become codes of `bits` bits."""

    values: int
    num_bytes: int
    bits: int
    convert: Callable[[U8], Affine]


KINDS: Mapping[str, BlockKind] = {
    "Q4_0": BlockKind(32, 18, 4, _q4_0),
    "Q4_1": BlockKind(32, 20, 4, _q4_1),
    "Q5_0": BlockKind(32, 22, 5, _q5_0),
    "Q5_1": BlockKind(32, 24, 5, _q5_1),
    "Q8_0": BlockKind(32, 34, 8, _q8_0),
    "Q2_K": BlockKind(256, 84, 4, _q2_k),
    "Q3_K": BlockKind(256, 110, 5, _q3_k),
    "Q4_K": BlockKind(256, 144, 4, _q4_k),
    "Q5_K": BlockKind(256, 176, 5, _q5_k),
    "Q6_K": BlockKind(256, 210, 8, _q6_k),
    "IQ4_NL": BlockKind(32, 18, 8, _iq4_nl),
    "IQ4_XS": BlockKind(256, 136, 8, _iq4_xs),
}
