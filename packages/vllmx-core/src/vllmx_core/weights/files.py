"""Files of weights, read range by range.

Nothing is mapped: a mapped file that shrinks, or whose disk fails, kills the process at the next
look, where a read ends as an error that names the file.
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
"""The bytes that one call reads; systems take no more than 2 GiB."""
KEPT_BYTES = 256 << 20
_SKIPPED_BYTES = 4096
"""Runs that lie further apart are read one by one; less is read along with them and left out: a
call costs as much, and a disk gives whole pages."""
_AHEAD_BYTES = 128 << 10
"""Runs closer than this are fetched from the disk together with the gap between them: another rank
needs the gap, and many small reads take far longer."""
_ROOM_BYTES = 1 << 20
"""The size of one read over runs and the gaps between them."""


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
        self._file = open_model_file(path)
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
        self._read([(found.data, begin)])
        return found

    def read_runs(self, begin: int, stride_bytes: int, runs: Bytes) -> None:
        """Fills (n, bytes) with as many bytes each from `begin` on, from `stride_bytes` behind it
        on, and so on. Raises as `read`."""
        places = range(begin, begin + len(runs) * stride_bytes, stride_bytes)
        self._expect(begin, places[-1] + runs.shape[1], runs.shape[1], stride_bytes)
        self._read(list(zip((run.data for run in runs), places, strict=True)))

    def _expect(self, begin: int, end: int, run_bytes: int, stride_bytes: int) -> None:
        """Has the system fetch the runs from `begin` to before `end` together, where it can."""
        if not hasattr(os, "posix_fadvise"):
            return
        if stride_bytes - run_bytes < _AHEAD_BYTES:
            run_bytes = stride_bytes = _AHEAD_BYTES
        with suppress(OSError):  # whatever is wrong, the read will tell
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
    """Bytes of a file, read whenever they are asked for: all of a range, or runs of them at equal
    distances, one behind the other, such as some columns of a matrix."""

    file: WeightFile
    begin: int
    end: int
    """The byte behind the last one that is wanted."""
    run_bytes: int = 0
    """The bytes of each run; 0: all are wanted."""
    stride_bytes: int = 0
    """Bytes from the beginning of a run to that of the next."""
    before_read: Callable[[], None] | None = None
    """Called before each read, also of what is cut out of the range; what it raises ends that."""

    @property
    def num_bytes(self) -> int:
        return self._runs * self.run_bytes if self.run_bytes else self.end - self.begin

    @property
    def _runs(self) -> int:
        return (self.end - self.begin - self.run_bytes) // self.stride_bytes + 1

    def cut(self, begin: int, end: int) -> FileRange:
        """A part of it, from its byte `begin` to before its byte `end`; of runs, whole ones."""
        assert 0 <= begin <= end <= self.num_bytes, (begin, end, self)
        run, stride = self.run_bytes, self.stride_bytes
        if not run or begin == end:
            return self._whole(self.begin + begin, self.begin + end)
        assert begin % run == 0 == end % run, (begin, end, self)
        first, last = begin // run, end // run - 1
        return self._of_runs(self.begin + first * stride, self.begin + last * stride + run)

    def columns(self, row_bytes: int, begin: int, end: int) -> FileRange:
        """The bytes from `begin` to before `end` of each of its rows of `row_bytes`. Rows of runs
        are the runs."""
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
        """The same as one range, where nothing is between the runs."""
        if self.run_bytes in (self.stride_bytes, self.end - self.begin):
            return self._whole(self.begin, self.end)
        return self

    def read(self, room: Bytes | None = None) -> Bytes:
        """See `WeightFile.read`."""
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
        """Fills (n, run_bytes) with the runs out of ranges in which they and others lie."""
        run, stride = self.run_bytes, self.stride_bytes
        step = min(len(runs), max(1, _ROOM_BYTES // stride))
        around = np.empty(step * stride, np.uint8)
        for first in range(0, len(runs), step):
            some = runs[first : first + step]
            begin = self.begin + first * stride
            self.file.read(begin, begin + (len(some) - 1) * stride + run, around)
            some[:] = around[: len(some) * stride].reshape(len(some), stride)[:, :run]

    def kept(self) -> Bytes:
        """`read` for who will read it again soon; the bytes are not the caller's own."""
        return self.file.kept.read(self)
