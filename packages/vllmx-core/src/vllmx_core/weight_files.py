"""Files of weights, read range by range.

Nothing is mapped: a mapped file that shrinks, or whose disk fails, kills the process at the next
look, where a read ends as an error that names the file.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllmx_core.errors import WeightFormatError
from vllmx_core.files import open_regular
from vllmx_core.records import Record

Bytes = npt.NDArray[np.uint8]

_CALL_BYTES = 1 << 30
"""The bytes that one call reads; systems take no more than 2 GiB."""
KEPT_BYTES = 256 << 20


class ReadingRoom(threading.local):
    """Memory of each thread that reads piece after piece: new memory costs as much as the read."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> Bytes:
        """Uninitialised, until the thread asks again."""
        if len(self._room) < num_bytes:
            self._room = np.empty(num_bytes, np.uint8)
        return self._room


class KeptReads:
    """The ranges that were last read by who reads one again and again, at most `KEPT_BYTES` of
    them, or a single larger one. Thread-safe: who wants the same range waits for it."""

    def __init__(self) -> None:
        self._found: dict[FileRange, Bytes] = {}  # the latest last
        self._lock = threading.Lock()

    def read(self, place: FileRange) -> Bytes:
        """`place.read()`, or what it gave before. Raises WeightFormatError."""
        with self._lock:
            data = self._found.pop(place, None)
            self._found[place] = place.read() if data is None else data
            while len(self._found) > 1 and sum(map(len, self._found.values())) > KEPT_BYTES:
                del self._found[next(iter(self._found))]
            return self._found[place]

    def clear(self) -> None:
        with self._lock:
            self._found.clear()


class WeightFile:
    """An opened file. Thread-safe, but for `close`.

    Args:
        kept: shared by the files of one model, so that its limit holds for all.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, kept: KeptReads | None = None) -> None:
        self.path = path
        self.kept = kept or KeptReads()
        self._file = open_regular(path)
        self._close = weakref.finalize(self, self._file.close)
        self.num_bytes = self._size()

    def range(self, begin: int, end: int) -> FileRange:
        """Bytes from `begin` to before `end`, not read so far."""
        assert 0 <= begin <= end <= self.num_bytes, (begin, end, self.num_bytes)
        return FileRange(self, begin, end)

    def read(self, begin: int, end: int, room: Bytes | None = None) -> Bytes:
        """These bytes, at the front of `room` or else in memory of their own. Raises
        WeightFormatError where the file has changed its size since it was opened, or cannot be
        read."""
        found = np.empty(end - begin, np.uint8) if room is None else room[: end - begin]
        try:
            filled = self._size() == self.num_bytes and self._fill(found, begin)
        except OSError as error:
            raise WeightFormatError(
                f"{self.path} cannot be read ({error.strerror}): check the disk, and load the model"
                " again"
            ) from error
        if not filled:
            raise WeightFormatError(
                f"{self.path} had {self.num_bytes} bytes when it was opened and has {self._size()}"
                " now: let nobody write it while it is loaded, and load the model again"
            )
        return found

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _fill(self, buffer: Bytes, begin: int) -> bool:
        """Whether the file held all that was wanted."""
        view, done = buffer.data, 0
        while done < len(view):
            more = os.preadv(self._file.fileno(), [view[done : done + _CALL_BYTES]], begin + done)
            if not more:
                return False
            done += more
        return True

    def close(self) -> None:
        """Nothing of it may be read any more. May be called twice."""
        self.kept.clear()
        self._close()


class FileRange(Record):
    """Bytes of a file, read whenever they are asked for."""

    file: WeightFile
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def cut(self, begin: int, end: int) -> FileRange:
        """A part of it, from its byte `begin` to before its byte `end`."""
        assert 0 <= begin <= end <= self.num_bytes, (begin, end, self)
        return FileRange(self.file, self.begin + begin, self.begin + end)

    def read(self, room: Bytes | None = None) -> Bytes:
        """See `WeightFile.read`."""
        return self.file.read(self.begin, self.end, room)

    def kept(self) -> Bytes:
        """`read` for who will read it again soon; the bytes are not the caller's own."""
        return self.file.kept.read(self)
