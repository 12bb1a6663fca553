"""The output of an MCP server, cut into lines that are never longer than a limit."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 4 << 20
"""Longer messages are not read."""
MAX_NOISE_BYTES = 1 << 20
"""The most bytes, in all, of lines that are not messages: some servers greet."""
_ENDS = 256
_ID = rb'"id"\s*:\s*(\d{1,9})\s*'
_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?' + _ID + rb",")
_LAST = re.compile(_ID + rb'(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


class BabbleError(Exception):
    """The server does not speak the protocol."""


@dataclass(frozen=True, slots=True)
class Unread:
    """An answer of which only that is known to what it is one."""

    request_id: int
    reason: str


class MessageLines:
    """Puts lines together out of what comes."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._size = 0
        self._is_large = False
        self._tail = b""
        """The last bytes of a line that is too long; `_line` has its beginning then."""
        self._noise = 0

    def feed(self, data: bytes) -> Iterator[bytes | Unread]:
        """Lines that may be messages, and answers that are too large. Raises BabbleError."""
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._add(piece)
            yield from self._end()
        self._add(rest)

    def unread(self, line: bytes) -> Unread | None:
        """The request that an unreadable line answers. Raises BabbleError for too many of them."""
        self._note_noise(len(line))
        found = _FIRST.match(line) or _LAST.search(line[-_ENDS:])
        return None if found is None else Unread(int(found[1]), "the answer cannot be read")

    def _note_noise(self, num_bytes: int) -> None:
        self._noise += num_bytes + 1
        if self._noise > MAX_NOISE_BYTES:
            raise BabbleError("it writes lines that are not messages")

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._max_bytes:
            self._line += piece
            return
        if not self._is_large:
            self._is_large, self._tail = True, bytes(self._line[-_ENDS:])
            self._line = (self._line + piece[:_ENDS])[:_ENDS]
        self._tail = (self._tail + piece[-_ENDS:])[-_ENDS:]

    def _end(self) -> Iterator[bytes | Unread]:
        line, tail, is_large = bytes(self._line), self._tail, self._is_large
        self._line, self._tail, self._size, self._is_large = bytearray(), b"", 0, False
        if is_large:
            found = _FIRST.match(line) or _LAST.search(tail)
            if found is None:
                raise BabbleError(f"it writes lines of more than {self._max_bytes} bytes")
            yield Unread(int(found[1]), "the answer is larger than what is read of one")
        elif line.lstrip().startswith(b"{"):
            yield line
        elif line.strip():
            self._note_noise(len(line))


class Pace:
    """The rate at which a server is read, so that reading it leaves time for others."""

    MESSAGES_PER_S = 2000.0
    BYTES_PER_S = 8e6
    SKIPPED_BYTES_PER_S = 128e6
    _BURST_S = 1.0

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._seen_s = time.monotonic()

    def wait_s(self, num_messages: int, num_bytes: int, num_skipped: int) -> float:
        """Seconds to wait before the next read."""
        now_s = time.monotonic()
        self._debt_s = max(0.0, self._debt_s - (now_s - self._seen_s))
        self._seen_s = now_s
        self._debt_s += num_messages / self.MESSAGES_PER_S + num_bytes / self.BYTES_PER_S
        self._debt_s += num_skipped / self.SKIPPED_BYTES_PER_S
        return max(0.0, self._debt_s - self._BURST_S)
