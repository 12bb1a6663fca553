"""The memory that all ranks of a group share.

It is a file without a name, which ranks inherit as a descriptor: when the last of them is gone,
however that came, nothing of it is left. Layout:

    words of the group     the abort word
    words of each rank     one word a cache line, written by that rank alone: heartbeat, frames
                           taken, calls of the communicator, ids of the last step
    causes                 what each rank says of its failure, as text
    buffers                two for each rank, for the communicator
    ring                   frames from rank 0
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import CapacityError
from vllmx_core.memory import format_bytes

LINE_BYTES = 64
NUM_CHECKSUMS = 8
"""More than there are steps in flight."""
PAGE_BYTES = 4096
CAUSE_BYTES = 1024
BUFFER_BYTES = 4 << 20
"""The bytes of one communicator call; longer ones go in pieces."""
RING_BYTES = 16 << 20


class Word(IntEnum):
    """The words of a rank, by their line."""

    HEARTBEAT = 0
    TAKEN = 1
    """Frames that it needs no more."""
    ARRIVED = 2
    """Calls of the communicator that it has begun; see also `part_bytes` and `bridged`."""
    IDS = 3
    """Checksums of the ids of its last steps, `NUM_CHECKSUMS` words in turn, beside `CHECKED`."""
    CHECKED = 4
    """Steps whose checksum was written."""
    PIECES = 5
    """The pieces of what the rank before sent that a stage needs no more (`vllmx_tp.wire`). What it
    sends itself it counts in `ARRIVED`."""


RANK_BYTES = len(Word) * LINE_BYTES


class Region:
    """One rank's view of it."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.fd, self.num_ranks = fd, num_ranks
        self.map = mmap.mmap(fd, size_of(num_ranks))
        self._bytes = np.frombuffer(self.map, np.uint8)
        self._words = PAGE_BYTES
        self._causes = self._words + _paged(num_ranks * RANK_BYTES)
        self.buffers_at = self._causes + _paged(num_ranks * CAUSE_BYTES)
        ring = self.buffers_at + 2 * num_ranks * BUFFER_BYTES
        self.ring = self._bytes[ring : ring + RING_BYTES]

    @classmethod
    def create(cls, num_ranks: int) -> Region:
        """A new one, all zeros. Raises CapacityError where there is no memory for it."""
        fd = os.memfd_create("vllmx-ranks") if hasattr(os, "memfd_create") else _unlinked()
        size = size_of(num_ranks)
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)  # or a rank would be killed at its first write
        except OSError as error:
            os.close(fd)
            raise CapacityError(
                f"{num_ranks} ranks share {format_bytes(size)} of memory, which cannot be had"
                f" ({error.strerror}): free memory or ask for fewer ranks",
                param="tensor_parallel_size",
            ) from error
        return cls(fd, num_ranks)

    @property
    def address(self) -> int:
        """The address of the region in this process."""
        return int(self._bytes.ctypes.data)

    def word_at(self, rank: int, word: Word) -> int:
        """Bytes from the beginning to a rank's word."""
        return self._words + rank * RANK_BYTES + word * LINE_BYTES

    def word(self, rank: int, word: Word) -> npt.NDArray[np.uint32]:
        """(1,) which the rank itself writes and all may read."""
        at = self.word_at(rank, word)
        return self._bytes[at : at + 4].view(np.uint32)

    def checksums(self, rank: int) -> npt.NDArray[np.uint32]:
        """(NUM_CHECKSUMS,) of the ids that a rank drew: of step n, counted from 0, in entry
        n % NUM_CHECKSUMS."""
        at = self.word_at(rank, Word.IDS)
        return self._bytes[at : at + 4 * NUM_CHECKSUMS].view(np.uint32)

    def part_bytes(self, rank: int, turn: int) -> npt.NDArray[np.uint32]:
        """(1,) bytes of the part that lies in a rank's buffer of that turn; beside `ARRIVED`, whose
        second word counts those who sleep for the first."""
        at = self.word_at(rank, Word.ARRIVED) + 4 * (2 + turn)
        return self._bytes[at : at + 4].view(np.uint32)

    def bridged(self, rank: int) -> npt.NDArray[np.uint32]:
        """(1,) not zero: a link to another host sleeps until the rank arrives, so it is to wake
        it."""
        at = self.word_at(rank, Word.ARRIVED) + 16
        return self._bytes[at : at + 4].view(np.uint32)

    @property
    def aborted(self) -> npt.NDArray[np.uint32]:
        """(1,) not zero: the group has ended."""
        return self._bytes[:4].view(np.uint32)

    def buffer(self, rank: int, turn: int) -> npt.NDArray[np.uint8]:
        """What a rank puts down for the others."""
        at = self.buffers_at + (2 * rank + turn) * BUFFER_BYTES
        return self._bytes[at : at + BUFFER_BYTES]

    def write_cause(self, rank: int, text: str) -> None:
        """Why a rank fails, before it aborts the group. The first of its causes stays."""
        if not self.cause(rank):
            data = text.encode("utf-8", "backslashreplace")[: CAUSE_BYTES - 1]
            at = self._causes + rank * CAUSE_BYTES
            self._bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def cause(self, rank: int) -> str:
        """What a rank said of its failure; empty: nothing."""
        at = self._causes + rank * CAUSE_BYTES
        data = self._bytes[at : at + CAUSE_BYTES].tobytes()
        return data.split(b"\0", 1)[0].decode("utf-8", "replace")

    def close(self) -> None:
        """The descriptor alone: views may still be read, the memory goes with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def size_of(num_ranks: int) -> int:
    """Bytes of the whole."""
    words, causes = _paged(num_ranks * RANK_BYTES), _paged(num_ranks * CAUSE_BYTES)
    return PAGE_BYTES + words + causes + 2 * num_ranks * BUFFER_BYTES + RING_BYTES


def _paged(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _unlinked() -> int:
    fd, path = tempfile.mkstemp(prefix="vllmx-ranks-")
    os.unlink(path)
    return fd
