"""Stored tensors: their bytes, in memory or in a file, and their dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import F32
from vllmx_core.records import Record
from vllmx_core.weights.files import FileRange, ReadingRoom

DType = Literal[
    "f32", "f16", "bf16", "f64", "i64", "i32", "i16", "i8", "u32", "u8", "bool", "f8e4m3", "f8e5m2",
    "f8e8m0",
]  # fmt: skip
ITEM_BYTES: Mapping[str, int] = {
    "f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u32": 4,
    "u8": 1, "bool": 1, "f8e4m3": 1, "f8e5m2": 1, "f8e8m0": 1,
}  # fmt: skip
_NUMPY: Mapping[str, str] = {
    "f32": "<f4", "f16": "<f2", "bf16": "<u2", "f64": "<f8", "i64": "<i8", "i32": "<i4",
    "i16": "<i2", "i8": "i1", "u32": "<u4", "u8": "u1", "bool": "?", "f8e4m3": "u1",
    "f8e5m2": "u1", "f8e8m0": "u1",
}  # fmt: skip


def bf16_to_f32(words: npt.NDArray[np.uint16]) -> F32:
    """Exact: bfloat16 is the upper half of a float32."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(values)
    return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def float8_to_f32(codes: npt.NDArray[np.uint8], dtype: str) -> F32:
    """Exact values of f8e4m3 (finite: 0x7f and 0xff are NaN, no infinity), f8e5m2 (the upper half
    of a float16) or f8e8m0 (2 to the power code - 127, 0xff is NaN) codes, in their shape."""
    table: F32 = _FLOAT8[dtype][codes]
    return table


def _float8_tables() -> dict[str, F32]:
    codes = np.arange(256, dtype=np.uint16)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    fraction = np.where(exponent == 0, mantissa, mantissa + 8)
    e4m3 = np.ldexp(fraction.astype(np.float32), np.maximum(exponent, 1).astype(np.int32) - 10)
    e4m3 = np.where(codes & 128, -e4m3, e4m3).astype(np.float32)
    e4m3[[0x7F, 0xFF]] = np.nan
    e8m0 = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    e8m0[0xFF] = np.nan
    e5m2 = (codes << np.uint16(8)).view(np.float16).astype(np.float32)
    return {"f8e4m3": e4m3, "f8e5m2": e5m2, "f8e8m0": e8m0}


# 2 ** 128 at code 0xff is replaced by NaN; ARM calls the signalling NaNs of e5m2 invalid.
with np.errstate(over="ignore", invalid="ignore"):
    _FLOAT8 = _float8_tables()


class RawTensor(Record):
    """One tensor as a file stores it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    stored: npt.NDArray[np.uint8] | FileRange
    """(bytes,) little-endian, row-major: in memory, or a range of a file."""

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes if isinstance(self.stored, FileRange) else self.stored.nbytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """(bytes,). A range of a file is read at each access."""
        return self.stored.read() if isinstance(self.stored, FileRange) else self.stored

    def in_memory(self, room: ReadingRoom | None = None) -> RawTensor:
        """Returns the tensor with its bytes read, for repeated access. They go to `room`; without
        one they are shared with readers of the same range (`FileRange.kept`)."""
        if not isinstance(self.stored, FileRange):
            return self
        place = self.stored
        return replace(
            self, stored=place.kept() if room is None else place.read(room.of(place.num_bytes))
        )

    def view(self) -> npt.NDArray[np.generic]:
        """Returns `data` in its own dtype without a copy; bf16 as uint16, fp8 as uint8."""
        return self.data.view(_NUMPY[self.dtype]).reshape(self.shape)

    def rows(self, begin: int, end: int) -> RawTensor:
        """Returns entries [begin, end) of the first axis, unread."""
        entry_bytes = self.num_bytes // self.shape[0] if self.shape[0] else 0
        first, last = begin * entry_bytes, end * entry_bytes
        stored = self.stored
        part = stored.cut(first, last) if isinstance(stored, FileRange) else stored[first:last]
        return replace(self, shape=(end - begin, *self.shape[1:]), stored=part)

    def cols(self, begin: int, end: int, axis: int = 1) -> RawTensor:
        """Returns entries [begin, end) of a later axis, unread."""
        lead, width, *rest = (math.prod(self.shape[:axis]), *self.shape[axis:])
        if (begin, end) == (0, width) or not lead:
            return self
        row_bytes = self.num_bytes // lead
        first, last = (row_bytes // width * place for place in (begin, end))
        shape, stored = (*self.shape[:axis], end - begin, *rest), self.stored
        if isinstance(stored, FileRange):
            return replace(self, shape=shape, stored=stored.columns(row_bytes, first, last))
        part = np.ascontiguousarray(stored.reshape(lead, row_bytes)[:, first:last])
        return replace(self, shape=shape, stored=part.reshape(-1))

    def to_f32(self) -> F32:
        """Returns the values as float32, `data` itself where that is float32."""
        array = self.view()
        if self.dtype == "bf16":
            return bf16_to_f32(array)  # type: ignore[arg-type]
        if self.dtype in _FLOAT8:
            return float8_to_f32(array, self.dtype)  # type: ignore[arg-type]
        return array.astype(np.float32, copy=False)

    def joined_axes(self) -> RawTensor:
        """Returns the tensor with its first two axes as one."""
        first, second, *rest = self.shape
        return replace(self, shape=(first * second, *rest))

    def with_values(self, values: npt.NDArray[np.generic]) -> RawTensor:
        """Returns a tensor of this name and dtype with other values."""
        flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return replace(self, shape=values.shape, stored=flat)
