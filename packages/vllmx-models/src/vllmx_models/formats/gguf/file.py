"""Reader of one GGUF file.

Layout (versions 2 and 3, little-endian): "GGUF", version, number of tensors, number of metadata
entries; the entries; for each tensor name, dimensions (fastest first), type and offset; padding to
the alignment; the data. The file is untrusted: every number is checked against the file's real size
before anything is read.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import ModelNotFoundError, WeightFormatError, shown
from vllmx_core.records import Record
from vllmx_core.weights.files import FileRange, WeightFile

from vllmx_models.formats.gguf.blocks import FOREIGN_TYPES, TENSOR_TYPES, TensorType
from vllmx_models.formats.gguf.cursor import Cursor
from vllmx_models.formats.gguf.metadata import Value, read_metadata

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_BYTES = 24
MAX_ALIGNMENT = 1 << 20
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 256
MAX_RANK = 4
MAX_ELEMENTS = 1 << 56
_SMALLEST_ENTRY = 8 + 1 + 4 + 8 + 4 + 8
"""Bytes of the shortest tensor entry."""


class TensorInfo(Record):
    """The type, shape and place of a tensor in the file."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    """Slowest dimension first: (rows, cols) of a matrix."""
    start: int
    """First byte, counted from the start of the file."""
    num_bytes: int


class GGUFFile:
    """An opened file. Thread-safe: nothing changes between construction and `close`.

    Raises:
        WeightFormatError: damaged, truncated or hostile file, or one of an unknown version.
        ModelNotFoundError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = WeightFile(path)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"{path} cannot be opened ({error}): check that it exists and is readable",
                param="model",
            ) from error
        try:
            cursor = Cursor(self._file)
            num_tensors, num_entries = _read_start(cursor)
            self.metadata: Mapping[str, Value] = read_metadata(cursor, num_entries)
            self.tensors: Mapping[str, TensorInfo] = _read_tensors(
                cursor, num_tensors, _alignment(cursor, self.metadata)
            )
        except BaseException:
            self.close()
            raise

    def stored(self, name: str) -> FileRange:
        """The bytes of a tensor, unread. Raises KeyError for an unknown name."""
        info = self.tensors[name]
        return self._file.range(info.start, info.start + info.num_bytes)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor. Raises KeyError for an unknown name, WeightFormatError."""
        return self.stored(name).read()

    def close(self) -> None:
        """Closes the file; neither tensors nor metadata may be read afterwards."""
        self.metadata = {}
        self._file.close()


def _read_start(cursor: Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata entries."""
    if cursor.size < MIN_BYTES:
        raise WeightFormatError(
            f"{cursor.path} has {cursor.size} bytes, fewer than the {MIN_BYTES} of a GGUF header:"
            " download the file again"
        )
    start = cursor.skip(len(MAGIC), "the magic")
    magic = cursor.data[start : cursor.position]
    if magic != MAGIC:
        raise WeightFormatError(
            f"{cursor.path} begins with {magic!r}, not with {MAGIC!r}: it is not a GGUF file"
        )
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise WeightFormatError(
            f"{cursor.path} is a big-endian GGUF file: use the little-endian one, or convert it"
            " with gguf_convert_endian.py of the gguf package"
        )
    if version not in VERSIONS:
        raise WeightFormatError(
            f"{cursor.path} is a GGUF file of version {version}, versions"
            f" {' and '.join(map(str, VERSIONS))} are known: convert the model again"
        )
    num_tensors, num_entries = cursor.u64("the number of tensors"), cursor.u64("their metadata")
    if num_tensors > MAX_TENSORS or num_tensors * _SMALLEST_ENTRY > cursor.remaining:
        raise cursor.damaged(f"{num_tensors} tensors are claimed, more than the file can hold")
    return num_tensors, num_entries


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.damaged(
            f"general.alignment is {shown(value)}, a power of two up to {MAX_ALIGNMENT} is needed"
        )
    return value


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Reads all entries; their data must be inside the file and must not overlap."""
    entries = [_read_entry(cursor) for _ in range(count)]
    data_start = -(-cursor.position // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in entries:
        num_bytes = math.prod(shape) // kind.values * kind.num_bytes
        if offset % alignment:
            raise cursor.damaged(
                f"tensor {name!r} begins at offset {offset}, no multiple of the alignment"
                f" {alignment}"
            )
        if data_start + offset + num_bytes > cursor.size:
            raise WeightFormatError(
                f"{cursor.path} is truncated: tensor {name!r} ends at byte"
                f" {data_start + offset + num_bytes}, the file has {cursor.size}; download the"
                " file again"
            )
        if name in found:
            raise cursor.damaged(f"tensor {name!r} is there twice")
        found[name] = TensorInfo(name, kind, shape, data_start + offset, num_bytes)
    _check_overlaps(cursor, found)
    return found


def _check_overlaps(cursor: Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda info: info.start):
        if info.start < end:
            raise cursor.damaged(f"tensors {before!r} and {info.name!r} overlap", info.start)
        end, before = info.start + info.num_bytes, info.name


def _read_entry(cursor: Cursor) -> tuple[str, TensorType, tuple[int, ...], int]:
    """(name, type, shape, offset from the start of the data)."""
    name = cursor.string("a tensor's name", MAX_NAME_BYTES)
    label = f"tensor {name!r}"
    rank = cursor.u32(f"the rank of {label}")
    if not 1 <= rank <= MAX_RANK:
        raise cursor.damaged(f"{label} has {rank} dimensions, 1 to {MAX_RANK} are possible")
    shape = tuple(cursor.u64(f"a dimension of {label}") for _ in range(rank))[::-1]
    if 0 in shape or math.prod(shape) > MAX_ELEMENTS:
        raise cursor.damaged(f"{label} has the impossible shape {list(shape)}")
    kind = _tensor_type(cursor, cursor.u32(f"the type of {label}"), label)
    if rank == 1 and kind.values > 1:
        raise cursor.damaged(f"{label} has one dimension, which {kind.name} is not made for")
    if shape[-1] % kind.values:
        raise cursor.damaged(
            f"{label} has rows of {shape[-1]} values, {kind.name} needs a multiple of {kind.values}"
        )
    return name, kind, shape, cursor.u64(f"the offset of {label}")


def _tensor_type(cursor: Cursor, code: int, label: str) -> TensorType:
    if code in TENSOR_TYPES:
        return TENSOR_TYPES[code]
    known = ", ".join(kind.name for kind in TENSOR_TYPES.values())
    if code in FOREIGN_TYPES:
        raise WeightFormatError(
            f"{cursor.path}: {label} is stored as {FOREIGN_TYPES[code]}, which vllmx does not read;"
            f" use a file with these types only: {known}"
        )
    raise cursor.damaged(f"{label} is of the unknown type {code}; known: {known}")
