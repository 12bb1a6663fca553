"""What each format means, one element at a time: slow, and written without the package's code.

Integers come out of Python's own, floats out of their fields; the last line of each function is the
definition. float32 arithmetic throughout, as NumPy's scalars do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = np.float32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of a word's eight that its lowest, second lowest, ... four bits hold."""


def bit_field(words: Sequence[int], start: int, bits: int) -> int:
    """The integer at bit `start` of a string of 32-bit words, least significant bit first."""
    whole = 0
    for place, word in enumerate(words):
        whole += (int(word) & 0xFFFFFFFF) << (32 * place)
    return (whole >> start) & ((1 << bits) - 1)


def matrix(rows: int, cols: int, element: Callable[[int, int], Any]) -> Array:
    return np.array([[element(o, i) for i in range(cols)] for o in range(rows)], np.float32)


def gptq(
    qweight: Array,
    qzeros: Array | None,
    scales: Array,
    g_idx: Array | None,
    *,
    bits: int,
    group_size: int,
    stored_minus_one: bool,
) -> Array:
    cols, rows = qweight.shape[0] * 32 // bits, qweight.shape[1]

    def element(o: int, i: int) -> Any:
        group = i // group_size if g_idx is None else int(g_idx[i])
        integer = bit_field(qweight[:, o].tolist(), i * bits, bits)
        if qzeros is None:
            zero = 2 ** (bits - 1)
        else:
            zero = bit_field(qzeros[group].tolist(), o * bits, bits)
            if stored_minus_one:
                zero = (zero + 1) % 2**bits
        return F32(integer - zero) * F32(scales[group, o])

    return matrix(rows, cols, element)


def awq_gemm(qweight: Array, qzeros: Array, scales: Array, *, group_size: int) -> Array:
    cols, rows = qweight.shape[0], qweight.shape[1] * 8

    def element(o: int, i: int) -> Any:
        word, place = o // 8, AWQ_ORDER.index(o % 8)
        integer = bit_field([qweight[i, word]], 4 * place, 4)
        zero = bit_field([qzeros[i // group_size, word]], 4 * place, 4)
        return F32(integer - zero) * F32(scales[i // group_size, o])

    return matrix(rows, cols, element)


def awq_gemv(qweight: Array, qzeros: Array, scales: Array, *, group_size: int) -> Array:
    rows, cols = qweight.shape[0], qweight.shape[1] * 8

    def element(o: int, i: int) -> Any:
        group = i // group_size
        integer = bit_field([qweight[o, i // 8]], 4 * (i % 8), 4)
        zero = bit_field([qzeros[o, group // 8]], 4 * (group % 8), 4)
        return F32(integer - zero) * F32(scales[o, group])

    return matrix(rows, cols, element)


def pack_quantized(
    packed: Array,
    shape: tuple[int, int],
    scale: Array,
    zero_point: Array | None,
    g_idx: Array | None,
    *,
    bits: int,
    group_size: int,
) -> Array:
    """`scale` (rows or 1, groups); `zero_point` packed along the rows, or plain like `scale`."""

    def element(o: int, i: int) -> Any:
        group = i // group_size if g_idx is None else int(g_idx[i])
        integer = bit_field(packed[o].tolist(), i * bits, bits) - 2 ** (bits - 1)
        if zero_point is None:
            zero = 0
        elif zero_point.dtype == np.int8:
            zero = int(zero_point[min(o, len(zero_point) - 1), group])
        else:
            zero = bit_field(zero_point[:, group].tolist(), o * bits, bits) - 2 ** (bits - 1)
        return F32(integer - zero) * F32(scale[min(o, len(scale) - 1), group])

    return matrix(*shape, element)


def int8(weight: Array, scale: Array, zero_point: Array | None, *, group_size: int) -> Array:
    """`scale` (rows or 1, groups)."""

    def element(o: int, i: int) -> Any:
        at = (min(o, len(scale) - 1), i // group_size)
        zero = 0 if zero_point is None else int(zero_point[at])
        return F32(int(weight[o, i]) - zero) * F32(scale[at])

    return matrix(*weight.shape, element)


def e4m3(code: int) -> float:
    """One sign, four exponent (bias 7) and three mantissa bits; all ones is NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(code: int) -> float:
    """One sign, two exponent (bias 1) and one mantissa bit."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa / 2
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def e8m0(code: int) -> float:
    return float("nan") if code == 255 else 2.0 ** (code - 127)


def fp8(codes: Array, scale: Array, block: tuple[int, int]) -> Array:
    """`scale` (rows / block rows, cols / block cols), rounded up, of floats."""

    def element(o: int, i: int) -> Any:
        return F32(e4m3(int(codes[o, i]))) * F32(scale[o // block[0], i // block[1]])

    return matrix(*codes.shape, element)


def fp4(packed: Array, scale: Callable[[int, int], Any], group_size: int) -> Array:
    """`scale(row, group)` is the float32 that the group is multiplied by."""

    def element(o: int, i: int) -> Any:
        byte = int(packed[o, i // 2])
        return F32(e2m1(byte >> 4 if i % 2 else byte & 15)) * F32(scale(o, i // group_size))

    return matrix(packed.shape[0], packed.shape[1] * 2, element)
