"""Files of weights, read range by range.

Nothing is memory-mapped: if a mapped file shrinks or its disk fails, the next access kills the
process, whereas a read raises an error that names the file.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllmx_core.errors import WeightFormatError
from vllmx_core.records import Record
from vllmx_core.system.files import open_model_file

Bytes = npt.NDArray[np.uint8]

_CALL_BYTES = 1 << 30
"""Bytes of one read call; systems allow at most 2 GiB."""
KEPT_BYTES = 256 << 20
_SKIPPED_BYTES = 4096
"""Runs further apart than this are read one by one. Smaller gaps are read and dropped: a call costs
as much, and disks read whole pages."""
_AHEAD_BYTES = 128 << 10
"""Runs closer than this are fetched from the disk together with the gap between them: another rank
needs the gap, and many small reads take far longer."""
_ROOM_BYTES = 1 << 20
"""The size of one read over runs and the gaps between them."""


class ReadingRoom(threading.local):
    """A buffer of each thread for successive reads: new memory costs as much as the read."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> Bytes:
        """Uninitialised, until the thread asks again."""
        if len(self._room) < num_bytes:
            self._room = np.empty(num_bytes, np.uint8)
        return self._room


class KeptReads:
    """A cache of ranges that are read repeatedly: the latest ones, at most `KEPT_BYTES`, or a
    single larger one. Thread-safe; concurrent readers of one range wait for the first."""

    def __init__(self) -> None:
        self._found: dict[FileRange, Bytes] = {}  # the latest last
        self._lock = threading.Lock()

    def read(self, place: FileRange) -> Bytes:
        """Returns `place.read()` or its cached result. Raises WeightFormatError."""
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
        self._file = open_model_file(path)
        self._close = weakref.finalize(self, self._file.close)
        self.num_bytes = self._size()

    def range(self, begin: int, end: int) -> FileRange:
        """The bytes from `begin` to before `end`, unread."""
        assert 0 <= begin <= end <= self.num_bytes, (begin, end, self.num_bytes)
        return FileRange(self, begin, end)

    def read(self, begin: int, end: int, room: Bytes | None = None) -> Bytes:
        """Reads the bytes into the front of `room`, or into new memory. Raises WeightFormatError if
        the file's size has changed since it was opened, or if it cannot be read."""
        found = np.empty(end - begin, np.uint8) if room is None else room[: end - begin]
        self._read([(found.data, begin)])
        return found

    def read_runs(self, begin: int, stride_bytes: int, runs: Bytes) -> None:
        """Fills each of the n rows of (n, bytes): the first from `begin`, each next one from
        `stride_bytes` further on. Raises as `read`."""
        places = range(begin, begin + len(runs) * stride_bytes, stride_bytes)
        self._expect(begin, places[-1] + runs.shape[1], runs.shape[1], stride_bytes)
        self._read(list(zip((run.data for run in runs), places, strict=True)))

    def _expect(self, begin: int, end: int, run_bytes: int, stride_bytes: int) -> None:
        """Asks the system to prefetch the runs from `begin` to before `end`, if it can."""
        if not hasattr(os, "posix_fadvise"):
            return
        if stride_bytes - run_bytes < _AHEAD_BYTES:
            run_bytes = stride_bytes = _AHEAD_BYTES
        with suppress(OSError):  # the read reports it
            for place in range(begin, end, stride_bytes):
                os.posix_fadvise(self._file.fileno(), place, run_bytes, os.POSIX_FADV_WILLNEED)

    def _read(self, wanted: Sequence[tuple[memoryview, int]]) -> None:
        """Fills each buffer from its offset in the file."""
        try:
            filled = self._size() == self.num_bytes and all(
                self._fill(buffer, begin) for buffer, begin in wanted
            )
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

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _fill(self, view: memoryview, begin: int) -> bool:
        """False if the file ends before the buffer is full."""
        done = 0
        while done < len(view):
            more = self._read_into(view[done : done + _CALL_BYTES], begin + done)
            if not more:
                return False
            done += more
        return True

    def _read_into(self, view: memoryview, begin: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], begin)
        with self.path.open("rb", buffering=0) as file:  # Windows: threads share no position
            file.seek(begin)
            return file.readinto(view) or 0

    def close(self) -> None:
        """Closes the file; nothing may be read afterwards. May be called twice."""
        self.kept.clear()
        self._close()


class FileRange(Record):
    """Bytes of a file, read on each access: a whole range, or equally spaced runs of bytes, such as
    some columns of a matrix."""

    file: WeightFile
    begin: int
    end: int
    """One past the last byte."""
    run_bytes: int = 0
    """The bytes of each run; 0: all are wanted."""
    stride_bytes: int = 0
    """Bytes from the beginning of a run to that of the next."""
    before_read: Callable[[], None] | None = None
    """Called before each read of the range or of its cuts; may raise to stop the read."""

    @property
    def num_bytes(self) -> int:
        return self._runs * self.run_bytes if self.run_bytes else self.end - self.begin

    @property
    def _runs(self) -> int:
        return (self.end - self.begin - self.run_bytes) // self.stride_bytes + 1

    def cut(self, begin: int, end: int) -> FileRange:
        """The part from byte `begin` to before byte `end` of the range; runs must stay whole."""
        assert 0 <= begin <= end <= self.num_bytes, (begin, end, self)
        run, stride = self.run_bytes, self.stride_bytes
        if not run or begin == end:
            return self._whole(self.begin + begin, self.begin + end)
        assert begin % run == 0 == end % run, (begin, end, self)
        first, last = begin // run, end // run - 1
        return self._of_runs(self.begin + first * stride, self.begin + last * stride + run)

    def columns(self, row_bytes: int, begin: int, end: int) -> FileRange:
        """The bytes from `begin` to before `end` of each row of `row_bytes`; runs are rows."""
        assert 0 <= begin < end <= row_bytes, (begin, end, row_bytes)
        assert self.run_bytes in (0, row_bytes), (row_bytes, self)
        stride, skipped = self.stride_bytes or row_bytes, row_bytes - end
        return replace(
            self,
            begin=self.begin + begin,
            end=self.end - skipped,
            run_bytes=end - begin,
            stride_bytes=stride,
        )._joined()

    def _of_runs(self, begin: int, end: int) -> FileRange:
        return replace(self, begin=begin, end=end)._joined()

    def _whole(self, begin: int, end: int) -> FileRange:
        return replace(self, begin=begin, end=end, run_bytes=0, stride_bytes=0)

    def _joined(self) -> FileRange:
        """The same bytes as one range, if there are no gaps between the runs."""
        if self.run_bytes in (self.stride_bytes, self.end - self.begin):
            return self._whole(self.begin, self.end)
        return self

    def read(self, room: Bytes | None = None) -> Bytes:
        if self.before_read is not None:
            self.before_read()
        if not self.run_bytes:
            return self.file.read(self.begin, self.end, room)
        found = np.empty(self.num_bytes, np.uint8) if room is None else room[: self.num_bytes]
        runs = found.reshape(-1, self.run_bytes)
        if self.stride_bytes - self.run_bytes >= _SKIPPED_BYTES:
            self.file.read_runs(self.begin, self.stride_bytes, runs)
        else:
            self._read_over(runs)
        return found

    def _read_over(self, runs: Bytes) -> None:
        """Fills (n, run_bytes) by reading ranges that cover several runs and their gaps."""
        run, stride = self.run_bytes, self.stride_bytes
        step = min(len(runs), max(1, _ROOM_BYTES // stride))
        around = np.empty(step * stride, np.uint8)
        for first in range(0, len(runs), step):
            some = runs[first : first + step]
            begin = self.begin + first * stride
            self.file.read(begin, begin + (len(some) - 1) * stride + run, around)
            some[:] = around[: len(some) * stride].reshape(len(some), stride)[:, :run]

    def kept(self) -> Bytes:
        """Reads through the cache, for repeated reads; the bytes must not be changed."""
        return self.file.kept.read(self)
