"""The key-value part of a GGUF header, without copies of its arrays.

Numeric arrays are views into the header; arrays of strings are scanned once for their end and
decoded on first use. Limits keep a hostile file from costing more than its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from vllmx_core.errors import shown

from vllmx_models.formats.gguf.cursor import MAX_STRING_BYTES, Cursor

MAX_ENTRIES = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the specification's
MAX_STRINGS = 1 << 23
"""Strings in all arrays of one file, which Python scans one by one."""
MAX_INNER_ARRAYS = 1 << 16
"""Arrays inside arrays of one file, each an object of its own."""
MAX_DEPTH = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, tuple[str, np.dtype[Any]]] = {
    code: (form, np.dtype(kind))
    for code, form, kind in (
        (0, "<B", "u1"),
        (1, "<b", "i1"),
        (2, "<H", "<u2"),
        (3, "<h", "<i2"),
        (4, "<I", "<u4"),
        (5, "<i", "<i4"),
        (6, "<f", "<f4"),
        (7, "<B", "u1"),
        (10, "<Q", "<u8"),
        (11, "<q", "<i8"),
        (12, "<d", "<f8"),
    )
}
_LENGTH = struct.Struct("<Q")

Value = Any
"""int, float, bool, str, a read-only numpy array, a `StringArray`, or a tuple of inner arrays."""


@dataclass(frozen=True)
class StringArray(Sequence[str]):
    """An array of strings in the header, decoded at first use."""

    cursor: Cursor
    start: int
    end: int
    length: int
    key: str

    def __repr__(self) -> str:
        return f"[{self.length} strings]"

    @property
    def stored(self) -> bytes:
        """Lengths and bytes of all strings, as stored in the file."""
        return self.cursor.data[self.start : self.end]

    @cached_property
    def strings(self) -> list[str]:
        """All strings, decoded. Raises WeightFormatError for one that is not UTF-8."""
        data, position, found = self.cursor.data, self.start, []
        for _ in range(self.length):
            end = position + 8 + _LENGTH.unpack_from(data, position)[0]
            try:
                found.append(data[position + 8 : end].decode("utf-8"))
            except UnicodeDecodeError as error:
                what = f"an entry of {shown(self.key)} is not UTF-8"
                raise self.cursor.damaged(what, position + 8 + error.start) from error
            position = end
        return found

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.strings[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.strings)


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """Reads `count` entries at the cursor. Raises WeightFormatError."""
    if count > MAX_ENTRIES:
        raise cursor.damaged(f"{count} metadata entries, at most {MAX_ENTRIES} are allowed")
    reader = _Reader(cursor)
    found: dict[str, Value] = {}
    for _ in range(count):
        place = cursor.position
        key = cursor.string("a metadata key", MAX_KEY_BYTES)
        if key in found:
            raise cursor.damaged(f"the metadata key {shown(key)} is there twice", place)
        kind = cursor.u32(f"the type of {shown(key)}")
        found[key] = reader.value(kind, key, 0)
    return found


class _Reader:
    """Reads the values of one file, within common limits for costly kinds of values."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._left = {_STRING: MAX_STRINGS, _ARRAY: MAX_INNER_ARRAYS}

    def value(self, kind: int, key: str, depth: int) -> Value:
        cursor = self._cursor
        if kind == _STRING:
            return cursor.string(f"the value of {shown(key)}")
        if kind == _ARRAY:
            return self._array(key, depth + 1)
        if kind not in _NUMBERS:
            raise cursor.damaged(f"{shown(key)} is of the unknown value type {kind}")
        form, dtype = _NUMBERS[kind]
        start = cursor.skip(dtype.itemsize, f"the value of {shown(key)}")
        value = struct.unpack_from(form, cursor.data, start)[0]
        if kind != _BOOL:
            return value
        if value > 1:
            raise cursor.damaged(
                f"{shown(key)} is a truth value of {value}, neither 0 nor 1", start
            )
        return bool(value)

    def _array(self, key: str, depth: int) -> Value:
        cursor = self._cursor
        if depth > MAX_DEPTH:
            raise cursor.damaged(f"{shown(key)} nests arrays more than {MAX_DEPTH} deep")
        kind, count = (
            cursor.u32(f"the type of {shown(key)}"),
            cursor.u64(f"the length of {shown(key)}"),
        )
        if kind in _NUMBERS:
            return self._numbers(kind, count, key)
        if kind not in (_STRING, _ARRAY):
            raise cursor.damaged(f"{shown(key)} is an array of the unknown value type {kind}")
        smallest = 8 if kind == _STRING else 12
        if count * smallest > cursor.remaining:
            raise cursor.damaged(f"{shown(key)} claims {count} items, more than the file can hold")
        if count > self._left[kind]:
            raise cursor.damaged(
                f"{shown(key)} brings {count} strings or inner arrays, {self._left[kind]} are left"
                " of what a file may have"
            )
        self._left[kind] -= count
        if kind == _ARRAY:
            return tuple(self._array(key, depth + 1) for _ in range(count))
        return self._strings(count, key)

    def _numbers(self, kind: int, count: int, key: str) -> Value:
        dtype = _NUMBERS[kind][1]
        start = self._cursor.skip(count * dtype.itemsize, f"the array {shown(key)}")
        array = np.frombuffer(self._cursor.data, dtype, count, start)
        if kind != _BOOL:
            return array
        if array.size and array.max() > 1:
            raise self._cursor.damaged(
                f"{shown(key)} has truth values that are neither 0 nor 1", start
            )
        return array.view(np.bool_)

    def _strings(self, count: int, key: str) -> StringArray:
        """Scans the strings. A hot loop: it runs for every token of a vocabulary."""
        cursor, unpack = self._cursor, _LENGTH.unpack_from
        data, start, last = cursor.data, cursor.position, cursor.size - 8
        position, last_there = start, len(data) - 8
        for _ in range(count):
            if position > last_there:
                if position > last:
                    raise cursor.damaged(f"{shown(key)} ends beyond the file", position)
                cursor.need(position + 8)
                data, last_there = cursor.data, len(cursor.data) - 8
            length = unpack(data, position)[0]
            if length > MAX_STRING_BYTES or length > last - position:
                raise cursor.damaged(f"{shown(key)} has a string of {length} bytes", position)
            position += 8 + length
        cursor.need(position)
        cursor.position = position
        return StringArray(cursor, start, position, count, key)
