"""Checked reads from the header of a GGUF file (little-endian)."""

from __future__ import annotations

import struct

from vllmx_core.errors import WeightFormatError
from vllmx_core.weights.files import WeightFile

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
MAX_STRING_BYTES = 64 << 20
MAX_HEADER_BYTES = 512 << 20
_FIRST_BYTES = 1 << 20
"""Bytes of the first read; each further read doubles them."""


class Cursor:
    """A position in a file; every read checks that the bytes are there. `data` has the bytes read
    so far, from the first one.

    Raises:
        WeightFormatError: from each read, naming file, place and what was being read.
    """

    def __init__(self, file: WeightFile) -> None:
        self.path = file.path
        self.size = file.num_bytes
        self.data = b""
        self.position = 0
        self._file = file

    @property
    def remaining(self) -> int:
        return self.size - self.position

    def need(self, end: int) -> None:
        """Reads on until `data` reaches `end`, which is not beyond the file."""
        if end <= len(self.data):
            return
        if end > MAX_HEADER_BYTES:
            raise self.damaged(f"the header has more than {MAX_HEADER_BYTES} bytes")
        wanted = min(max(end, 2 * len(self.data), _FIRST_BYTES), self.size)
        self.data += self._file.read(len(self.data), wanted).tobytes()

    def skip(self, count: int, what: str) -> int:
        """Skips `count` bytes and returns their beginning in `data`."""
        if count > self.remaining:
            raise self.damaged(f"{what} needs {count} bytes, {self.remaining} are left")
        start = self.position
        self.need(start + count)
        self.position += count
        return start

    def u32(self, what: str) -> int:
        start = self.skip(4, what)
        value: int = _U32.unpack_from(self.data, start)[0]
        return value

    def u64(self, what: str) -> int:
        start = self.skip(8, what)
        value: int = _U64.unpack_from(self.data, start)[0]
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
        """Makes the error to raise; `position` defaults to the current one."""
        place = self.position if position is None else position
        return WeightFormatError(
            f"{self.path}, byte {place}: {what}; the file is damaged, download it again"
        )
