"""KV blocks in append-only files of a folder (`--kv-disk`), found again by the next process.

The folder holds the key of all digests, a lock, and segments. A segment begins with a magic and
what its blocks are of (`identity`); records follow: name, length, a CRC-32 of both, then the block
as `sealed` made it. The index is in memory. It is rebuilt from the records' heads, which end where
one is torn or damaged; a damaged block is met when it is read.

Only whole segments are deleted: those of other models first, then the one whose blocks were not
read for the longest time.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from threading import Lock

from vllmx_core.errors import ConfigError
from vllmx_core.records import MutableRecord
from vllmx_core.system.memory import format_bytes

logger = logging.getLogger("vllmx.tiers")

NAME_BYTES = 17
"""A digest, and the number of a cache group or 255 for states."""
_MAGIC = b"vllmx kv 1\n\0\0\0\0\0"
_IDENTITY_BYTES = 32
_START = len(_MAGIC) + _IDENTITY_BYTES
_HEAD = Struct(f"<{NAME_BYTES}sQI")
_KEY_BYTES, _SEAL_BYTES = 32, 16
_SEGMENT_BYTES = 64 << 20
_SEGMENTS = 8
"""The fewest segments that a full folder has, so that little is lost with one."""
_PAUSE_S = 30.0
"""Seconds without writes after one failed."""


def sealed(key: bytes, name: bytes, block: bytes) -> bytes:
    """The block behind a checksum that nobody without the key can make, and that is of this name
    alone."""
    return blake2b(name + block, digest_size=_SEAL_BYTES, key=key).digest() + block


def unsealed(key: bytes, name: bytes, data: bytes) -> memoryview | None:
    """The block that was sealed; None: it was changed, or is another one."""
    block = memoryview(data)[_SEAL_BYTES:]
    made = blake2b(name, digest_size=_SEAL_BYTES, key=key)
    made.update(block)
    return block if secrets.compare_digest(made.digest(), data[:_SEAL_BYTES]) else None


class _Segment(MutableRecord, eq=False):
    path: Path
    file: int
    num_bytes: int
    is_ours: bool
    """True if its blocks are of the loaded model."""
    used: int = 0
    """Grows with each block that is read; the least is deleted first."""


class DiskStore:
    """The folder of one process. Any thread may call it.

    Args:
        lock: the locked file of the folder.
        key: of the digests of this folder.
        clock: seconds, which never go back.
    """

    def __init__(
        self,
        folder: Path,
        lock: int,
        key: bytes,
        identity: bytes,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self._folder, self._lock_file, self._clock = folder, lock, clock
        self._identity, self._max_bytes = identity, max_bytes
        self._segment_bytes = min(_SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._lock = Lock()
        self._index: dict[bytes, tuple[_Segment, int, int]] = {}
        """The segment, begin and length of each block."""
        self._segments: list[_Segment] = []
        self._current: _Segment | None = None
        """The segment that is written: one that this process began."""
        self._num_used = self._number = 0
        self._write_at_s = 0.0
        self._is_closed = False
        self._scan()

    # --- blocks -----------------------------------------------------------------------------------
    def __contains__(self, name: bytes) -> bool:
        return name in self._index

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments, those of other models too."""
        return sum(segment.num_bytes for segment in self._segments)

    def read(self, name: bytes) -> bytes | None:
        """The bytes that were written under a name, whole but perhaps damaged; None: there are
        none."""
        with self._lock:
            place = self._index.get(name)
            if place is None or self._is_closed:
                return None
            segment, begin, length = place
            self._num_used += 1
            segment.used = self._num_used
            try:
                data = os.pread(segment.file, length, begin)
            except OSError as error:
                logger.warning("%s: %s", segment.path, error)
                data = b""
            if len(data) == length:
                return data
            del self._index[name]
            return None

    def forget(self, name: bytes) -> None:
        """Finds a block no more, since it is damaged."""
        with self._lock:
            self._index.pop(name, None)

    def write(self, name: bytes, data: bytes) -> bool:
        """Appends a block, unless the name is known. False: there is no room, or writing failed."""
        size = _HEAD.size + len(data)
        with self._lock:
            if name in self._index:
                return True
            if self._is_closed or self._clock() < self._write_at_s:
                return False
            if _START + size > self._max_bytes:
                return False
            try:
                segment = self._segment(size)
                self._append(segment, name, data)
            except OSError as error:
                self._write_at_s = self._clock() + _PAUSE_S
                logger.warning(
                    "--kv-disk %s: %s: nothing is written for %g s, and what is there stays usable",
                    self._folder,
                    error,
                    _PAUSE_S,
                )
                return False
            return True

    def clear(self) -> None:
        """Deletes the blocks of this model."""
        with self._lock:
            for segment in [one for one in self._segments if one.is_ours]:
                self._delete(segment)

    def close(self) -> None:
        """Closes all files and gives the folder free."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for segment in self._segments:
                os.close(segment.file)
            os.close(self._lock_file)

    # --- segments ---------------------------------------------------------------------------------
    def _append(self, segment: _Segment, name: bytes, data: bytes) -> None:
        begin = segment.num_bytes
        head = name + len(data).to_bytes(8, "little")
        record = head + zlib.crc32(head).to_bytes(4, "little")
        try:
            written = os.pwritev(segment.file, [record, data], begin)
            if written != len(record) + len(data):
                raise OSError(f"{written} of {len(record) + len(data)} bytes were written")
        except OSError:
            self._current = None  # what follows must not lie behind a torn record
            os.ftruncate(segment.file, begin)
            raise
        segment.num_bytes = begin + written
        self._index[name] = segment, begin + len(record), len(data)

    def _segment(self, size: int) -> _Segment:
        """The segment for a record of this size, behind the deletion of others where need be."""
        current = self._current
        if current is None or current.num_bytes + size > max(self._segment_bytes, _START + size):
            current = self._current = None
        wanted = size if current is not None else _START + size
        while self.num_bytes + wanted > self._max_bytes:
            others = [one for one in self._segments if one is not current]
            if not others:
                current, wanted, others = None, _START + size, self._segments
            self._delete(min(others, key=lambda one: (one.is_ours, one.used)))
        if current is None:
            current = self._current = self._begin()
        return current

    def _begin(self) -> _Segment:
        self._number += 1
        path = self._folder / f"{self._number:08d}.seg"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, _MAGIC + self._identity, 0)
        except OSError:
            os.close(file)
            path.unlink()
            raise
        self._num_used += 1
        segment = _Segment(path, file, _START, True, self._num_used)
        self._segments.append(segment)
        return segment

    def _delete(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        if self._current is segment:
            self._current = None
        self._index = {name: at for name, at in self._index.items() if at[0] is not segment}
        segment.path.unlink(missing_ok=True)
        os.close(segment.file)

    # --- the start --------------------------------------------------------------------------------
    def _scan(self) -> None:
        """Finds the segments of processes before, oldest first."""
        num_torn = num_foreign = 0
        for path in sorted(self._folder.glob("*.seg")):
            try:
                self._number = max(self._number, int(path.stem))
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except (OSError, ValueError):
                continue
            self._num_used += 1
            size = os.fstat(file).st_size
            segment = _Segment(path, file, size, False, self._num_used)
            self._segments.append(segment)
            segment.is_ours = os.pread(file, _START, 0) == _MAGIC + self._identity
            if segment.is_ours:
                num_torn += self._scan_records(segment) < size
            else:
                num_foreign += 1
        logger.info(
            "--kv-disk %s: %d blocks, %s",
            self._folder,
            self.num_blocks,
            format_bytes(self.num_bytes),
        )
        if num_torn or num_foreign:
            logger.warning(
                "--kv-disk %s: %d segments end with a damaged block, %d are of another model or"
                " version: they are passed over",
                self._folder,
                num_torn,
                num_foreign,
            )

    def _scan_records(self, segment: _Segment) -> int:
        """Files the records of a segment; returns the end of the last whole one."""
        at = _START
        while True:
            head = os.pread(segment.file, _HEAD.size, at)
            if len(head) < _HEAD.size:
                return at
            name, length, crc = _HEAD.unpack(head)
            begin = at + _HEAD.size
            if zlib.crc32(head[:-4]) != crc or begin + length > segment.num_bytes:
                return at
            self._index[name] = segment, begin, length
            at = begin + length


def open_store(path: str, identity: bytes, max_bytes: int) -> DiskStore | None:
    """The store in a folder, which is made if it is missing; None, with a line in the log, while
    another process has it.

    Args:
        identity: 32 bytes; blocks of other ones are never read.

    Raises ConfigError for a folder that cannot be used.
    """
    if sys.platform == "win32":
        raise ConfigError("--kv-disk needs Linux or macOS: leave it out", param="kv_disk")
    import fcntl

    with _usable(path) as folder:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        logger.warning("--kv-disk %s is in use by another process: going on without it", path)
        return None
    try:
        return DiskStore(folder, lock, _key(folder), identity, max_bytes)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"--kv-disk {path} cannot be read ({error}): name another folder", param="kv_disk"
        ) from error


def folder_key(path: str) -> bytes:
    """The key of a folder, which is made if it is missing. Raises ConfigError as `open_store`."""
    with _usable(path) as folder:
        return _key(folder)


@contextmanager
def _usable(path: str) -> Iterator[Path]:
    folder = Path(path).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"--kv-disk {path}: others may write there (mode {mode:04o}): chmod 700 {path}",
                param="kv_disk",
            )
        yield folder
    except OSError as error:
        raise ConfigError(
            f"--kv-disk {path} cannot be used ({error}): name a folder that this user may write",
            param="kv_disk",
        ) from error


def _key(folder: Path) -> bytes:
    """The folder's key; a new one where it is missing or has another length, which loses all
    blocks."""
    path = folder / "key"
    try:
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
        path.unlink()
    except FileNotFoundError:
        pass
    key = secrets.token_bytes(_KEY_BYTES)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, key)
    finally:
        os.close(file)
    return key
