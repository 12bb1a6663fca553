"""Checkpoints of integers with zero points (GPTQ, AWQ, compressed-tensors) as MLX's codes, scales
and biases: (code - zero) * scale is code * scale + bias with bias = -zero * scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights import WeightPart

U8 = npt.NDArray[np.uint8]
_AWQ_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where AWQ's output feature i of a word of eight lies."""


@dataclass(frozen=True, slots=True)
class Integers:
    """weight[:, i] = (codes[:, i] - zeros[:, group of i]) * scales[:, group of i]."""

    codes: U8  # (rows, cols)
    zeros: F32  # (rows or 1, groups or 1)
    scales: F32  # (rows or 1, groups)
    group_of: npt.NDArray[np.int32] | None = None
    """(cols,); None: groups of equal size in order."""


def unpack(words: AnyArray, bits: int, count: int) -> U8:
    """(n, count) codes of (n, w) words: the i-th of a row starts at bit i * bits of its bytes."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return np.stack([data & np.uint8(15), data >> np.uint8(4)], -1).reshape(len(data), -1)[
            :, :count
        ]
    starts = np.arange(count) * bits
    first, shift = starts >> 3, (starts & 7).astype(np.uint16)
    padded = np.pad(data, ((0, 0), (0, 1))).astype(np.uint16)
    window = padded[:, first] | padded[:, first + 1] << np.uint16(8)
    return ((window >> shift) & np.uint16((1 << bits) - 1)).astype(np.uint8)


def _gptq(part: WeightPart) -> Integers:
    rows, cols = part.shape
    bits, buffers = int(part.layout.bits), part.buffers
    codes = unpack(np.asarray(buffers["qweight"].view()).T, bits, cols)
    scales = buffers["scales"].to_f32().T  # (rows, groups)
    if "qzeros" in buffers:
        stored = unpack(np.asarray(buffers["qzeros"].view()), bits, rows)
        lacking = np.uint8(int(part.layout.options["zero_offset"]))
        zeros = ((stored + lacking) & np.uint8((1 << bits) - 1)).T.astype(np.float32)
    else:
        zeros = np.full((1, 1), 1 << (bits - 1), np.float32)
    group_of = None
    if part.layout.options["act_order"]:
        group_of = np.asarray(buffers["g_idx"].view()).astype(np.int32)
    return Integers(codes, zeros, scales, group_of)


def _awq(part: WeightPart) -> Integers:
    cols = part.shape[1]
    qweight, qzeros = (np.asarray(part.buffers[key].view()) for key in ("qweight", "qzeros"))
    scales = part.buffers["scales"].to_f32()
    if part.layout.options["packing"] == "gemm":  # output features along the words
        return Integers(_awq_order(qweight).T, _awq_order(qzeros).T.astype(np.float32), scales.T)
    groups = -(-cols // (part.layout.group_size or cols))
    zeros = unpack(qzeros, 4, groups).astype(np.float32)
    return Integers(unpack(qweight, 4, cols), zeros, scales[:, :groups])


def _awq_order(words: AnyArray) -> U8:
    codes = unpack(words, 4, words.shape[1] * 8)
    return codes.reshape(len(codes), -1, 8)[..., _AWQ_PLACE].reshape(len(codes), -1)


def _pack_int(part: WeightPart) -> Integers:
    rows, cols = part.shape
    bits, buffers = int(part.layout.bits), part.buffers
    codes = unpack(np.asarray(buffers["weight"].view()), bits, cols)
    zeros: AnyArray = np.full((1, 1), 1 << (bits - 1))
    if "zero_point" in buffers:
        stored = np.asarray(buffers["zero_point"].view())
        if buffers["zero_point"].dtype == "i32":
            zeros = unpack(stored.T, bits, rows).T
        else:
            zeros = _matrix(stored).astype(np.int32) + (1 << (bits - 1))
    group_of = None
    if "g_idx" in buffers:
        group_of = np.asarray(buffers["g_idx"].view()).astype(np.int32)
    scales = _matrix(buffers["scale"].to_f32())
    return Integers(codes, zeros.astype(np.float32), scales, group_of)


def _int8(part: WeightPart) -> Integers:
    codes = np.asarray(part.buffers["weight"].view()).view(np.uint8) ^ np.uint8(128)
    zeros = np.full((1, 1), 128, np.float32)
    if "zero_point" in part.buffers:
        zeros = zeros + _matrix(np.asarray(part.buffers["zero_point"].view())).astype(np.float32)
    return Integers(codes, zeros, _matrix(part.buffers["scale"].to_f32()))


def _matrix(values: AnyArray) -> AnyArray:
    return values if values.ndim == 2 else values.reshape(-1, 1)


READERS: Mapping[str, Callable[[WeightPart], Integers]] = {
    "gptq": _gptq, "awq": _awq, "pack_int": _pack_int, "int8": _int8,
}  # fmt: skip
"""By `QuantLayout.kind`."""
