"""Checked reads from the mapped bytes of a GGUF file (little-endian)."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from vllmx_core.errors import WeightFormatError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
MAX_STRING_BYTES = 64 << 20


class Cursor:
    """A position in a file; every read checks that the bytes are there.

    Raises:
        WeightFormatError: from each read, naming file, place and what was being read.
    """

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def skip(self, count: int, what: str) -> int:
        """Where `count` bytes begin; the position moves behind them."""
        if count > self.remaining:
            raise self.damaged(f"{what} needs {count} bytes, {self.remaining} are left")
        start = self.position
        self.position += count
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.skip(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.skip(8, what))[0]
        return value

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        """A length and so many bytes of UTF-8."""
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.damaged(f"{what} has {length} bytes, at most {limit} are allowed")
        start = self.skip(length, what)
        return self.decode(start, start + length, what)

    def decode(self, start: int, end: int, what: str) -> str:
        """Bytes of the file as UTF-8."""
        try:
            return self.data[start:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8", start + error.start) from error

    def damaged(self, what: str, position: int | None = None) -> WeightFormatError:
        """The error to raise; `position` defaults to where the cursor stands."""
        place = self.position if position is None else position
        return WeightFormatError(
            f"{self.path}, byte {place}: {what}; the file is damaged, download it again"
        )
