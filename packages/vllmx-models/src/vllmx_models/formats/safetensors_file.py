"""Reader of one safetensors file.

Layout: 8 bytes little-endian header length N, N bytes of JSON that map each tensor name to dtype,
shape and byte range, then the data. The file is untrusted: every number is checked against the
file's real size before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllmx_core.errors import ModelNotFoundError, WeightFormatError, shown
from vllmx_core.system.json_files import MIB, parse_json_object
from vllmx_core.weights.files import KeptReads, WeightFile
from vllmx_core.weights.tensor import DType, RawTensor

MAX_HEADER_BYTES = 100 * MIB
MAX_RANK = 16
MAX_DIMENSION = 1 << 40
MAX_ELEMENTS = 1 << 56

_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_DTYPES: Mapping[str, DType] = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U32": "u32",
    "U8": "u8",
    "BOOL": "bool",
    "F8_E4M3": "f8e4m3",
    "F8_E5M2": "f8e5m2",
    "F8_E8M0": "f8e8m0",
}


class SafetensorsFile:
    """An opened file. Thread-safe: nothing changes between construction and `close`.

    Raises:
        WeightFormatError: damaged, truncated or hostile file.
        ModelNotFoundError: it cannot be opened.
    """

    def __init__(self, path: Path, kept: KeptReads | None = None) -> None:
        self.path = path
        try:
            self._file = WeightFile(path, kept)
        except (OSError, ValueError) as error:  # the latter for a NUL in the name
            raise ModelNotFoundError(
                f"{path} cannot be opened ({error}): check that it exists and is readable",
                param="model",
            ) from error
        try:
            self._entries = self._read_header(self._file.num_bytes)
        except BaseException:
            self._file.close()
            raise

    @property
    def entries(self) -> Mapping[str, tuple[str, tuple[int, ...], int, int]]:
        """Name -> (dtype as in the file, shape, first byte, byte after the last)."""
        return self._entries

    def tensor(self, name: str) -> RawTensor:
        """Returns a tensor, unread. Raises KeyError for an unknown name, WeightFormatError for a
        valid dtype that vllmx does not support."""
        dtype, shape, begin, end = self._entries[name]
        if dtype not in _DTYPES:
            raise WeightFormatError(
                f"{self.path}: tensor {name!r} is stored as {dtype}, which vllmx does not read;"
                f" known: {', '.join(_DTYPES)}"
            )
        return RawTensor(name, _DTYPES[dtype], shape, self._file.range(begin, end))

    def close(self) -> None:
        """Closes the file; nothing may be read afterwards."""
        self._file.close()

    def _damaged(self, what: str) -> WeightFormatError:
        return WeightFormatError(f"{self.path} {what}: the file is damaged, download it again")

    def _read_header(self, file_bytes: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
        if file_bytes < 8:
            raise self._damaged(f"has {file_bytes} bytes, at least 8 are expected")
        header_bytes = int.from_bytes(self._file.read(0, 8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise self._damaged(
                f"claims a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed"
            )
        data_start = 8 + header_bytes
        if data_start > file_bytes:
            raise self._truncated(data_start, file_bytes)
        stored = self._file.read(8, data_start).tobytes()
        header = parse_json_object(stored, f"the header of {self.path}")
        _check_metadata(header.pop("__metadata__", None), self._damaged)
        entries = {name: self._entry(name, value) for name, value in header.items()}
        ranges = sorted((begin, end, name) for name, (_, _, begin, end) in entries.items())
        position = 0
        for begin, end, name in ranges:
            if begin != position:
                fault = "overlaps the one before it" if begin < position else "follows a hole"
                raise self._damaged(f"has a tensor {shown(name)} whose data {fault}")
            position = end
        if data_start + position > file_bytes:
            raise self._truncated(data_start + position, file_bytes)
        if data_start + position < file_bytes:
            surplus = file_bytes - data_start - position
            raise self._damaged(f"has {surplus} bytes that belong to no tensor")
        return {
            name: (dtype, shape, data_start + begin, data_start + end)
            for name, (dtype, shape, begin, end) in entries.items()
        }

    def _truncated(self, expected: int, found: int) -> WeightFormatError:
        return WeightFormatError(
            f"{self.path} is truncated: {expected} bytes are expected, {found} were found; download"
            " the file again"
        )

    def _entry(self, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
        """(dtype, shape, begin, end) with begin and end counted from the start of the data."""
        label = f"has a tensor {shown(name)}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(f"{label} whose entry is not dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise WeightFormatError(
                f"{self.path} {label} of unknown dtype {shown(dtype)}; known: {', '.join(_BITS)}"
            )
        if not isinstance(shape, list) or len(shape) > MAX_RANK or not _all_sizes(shape):
            raise self._damaged(f"{label} with an impossible shape {shown(shape)}")
        if not isinstance(offsets, list) or len(offsets) != 2 or not _all_sizes(offsets):
            raise self._damaged(f"{label} with impossible offsets {shown(offsets)}")
        if (
            math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS
        ):  # numpy refuses it even if empty
            raise self._damaged(f"{label} with an impossible shape {shape}")
        begin, end = offsets
        bits = math.prod(shape) * _BITS[dtype]
        if bits % 8 or end - begin != bits // 8:
            raise self._damaged(
                f"{label} of {dtype} {shape}, {bits // 8} bytes, but its data range holds"
                f" {end - begin}"
            )
        return dtype, tuple(shape), begin, end


def _all_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_DIMENSION for value in values)


def _check_metadata(metadata: Any, damaged: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged("has a __metadata__ entry that is not a map of strings")
