"""Writes one GGUF file, version 3: the inverse of `vllmx_models.formats.gguf.file`.

The header is written first, because all sizes follow from shapes and types; tensors follow one by
one, so that they need not be in memory together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import UnsupportedModelError, shown
from vllmx_core.records import Record
from vllmx_core.system.files import replacing

from vllmx_models.formats.gguf.blocks import TENSOR_TYPES, TYPES_BY_NAME
from vllmx_models.formats.gguf.file import DEFAULT_ALIGNMENT, MAGIC, TensorInfo
from vllmx_models.formats.gguf.metadata import StringArray

VERSION = 3
_U8, _I8, _U16, _I16, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64, _F64 = range(13)
_OF_DTYPE: Mapping[str, int] = {
    "u1": _U8,
    "i1": _I8,
    "u2": _U16,
    "i2": _I16,
    "u4": _U32,
    "i4": _I32,
    "f4": _F32,
    "u8": _U64,
    "i8": _I64,
    "f8": _F64,
    "b1": _BOOL,
}
_CODES = {kind.name: code for code, kind in TENSOR_TYPES.items()}


class NewTensor(Record):
    """A tensor to be written; `shape` with the slowest dimension first."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        kind = TYPES_BY_NAME[self.type]
        return math.prod(self.shape) // kind.values * kind.num_bytes

    @property
    def info(self) -> TensorInfo:
        """The entry that a reader would give, without its offset."""
        return TensorInfo(self.name, TYPES_BY_NAME[self.type], self.shape, 0, self.num_bytes)


def write_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    data: Iterable[Iterable[npt.NDArray[np.uint8]]],
) -> int:
    """Writes the file and gives its size. `data` has the bytes of each tensor in turn, in pieces.

    Values of `metadata`: bool, int (as uint32), float (as float32), str, a numpy array, or a
    sequence of str. The file appears under its name when it is complete.
    """
    with replacing(path) as file:
        file.write(_header(metadata, tensors))
        _pad(file)
        for tensor, pieces in zip(tensors, data, strict=True):
            written = 0
            for piece in pieces:
                written += file.write(piece.data)
            assert written == tensor.num_bytes, tensor
            _pad(file)
        return file.tell()


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))


def _header(metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), *_value(key, value)]
    offset = 0
    for tensor in tensors:
        rank = len(tensor.shape)
        shape = struct.pack(f"<I{rank}Q", rank, *reversed(tensor.shape))
        parts += [_string(tensor.name), shape, struct.pack("<IQ", _CODES[tensor.type], offset)]
        offset += -(-tensor.num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return b"".join(parts)


def _string(text: str) -> bytes:
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnsupportedModelError(
            f"{shown(text)} holds half a character (a lone surrogate), which a GGUF file cannot"
            " state: repair the model's files"
        ) from error
    return struct.pack("<Q", len(encoded)) + encoded


def _number(key: str, value: float) -> bytes:
    form, code = ("<II", _U32) if isinstance(value, int) else ("<If", _F32)
    try:
        return struct.pack(form, code, value)
    except (struct.error, OverflowError) as error:
        raise UnsupportedModelError(
            f"{key} = {shown(value)} is beyond what vllmx writes to a GGUF file, integers of 32"
            " bits and float32: repair the model's files"
        ) from error


def _value(key: str, value: Any) -> list[bytes]:
    """Encodes a value: the type's code, then the value."""
    if isinstance(value, bool):
        return [struct.pack("<IB", _BOOL, value)]
    if isinstance(value, int | float):
        return [_number(key, value)]
    if isinstance(value, str):
        return [struct.pack("<I", _STRING), _string(value)]
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value)
        kind = _OF_DTYPE[flat.dtype.str[1:]]
        return [struct.pack("<IIQ", _ARRAY, kind, len(flat)), flat.tobytes()]
    assert isinstance(value, Sequence), f"{key}: {type(value).__name__}"
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
    if isinstance(value, StringArray):
        return [head, value.stored]
    return [head, *(_string(text) for text in value)]
