"""Memory shared by all ranks of a group.

It is an unnamed file whose descriptor ranks inherit: when the last rank is gone, for whatever
reason, the memory is freed. Layout:

    words of the group     the abort word
    words of each seat     one a cache line (see `Word`), written by its rank alone, or by the link
                           that acts for a rank of another host
    causes                 each rank's failure, as text
    buffers                two for each seat, for the communicator
    ring                   frames from rank 0

Rank r has seat r, where the ranks of a stage exchange parts. If stages have several ranks, each
rank has one more seat, after those of all ranks, for what it passes to the next stage.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from vllmx_core.communicator import MOST_ROW_WIDTH
from vllmx_core.errors import CapacityError
from vllmx_core.records import Record
from vllmx_core.system.memory import format_bytes

from vllmx_tp.futex import publish

LINE_BYTES = 64
NUM_CHECKSUMS = 8
"""More than the steps in flight."""
PAGE_BYTES = 4096
CAUSE_BYTES = 1024
BUFFER_BYTES = 4 * MOST_ROW_WIDTH
"""Bytes of one communicator call; longer data are split into pieces of whole rows."""
RING_BYTES = 16 << 20


class Word(IntEnum):
    """The words of a rank, by their line."""

    HEARTBEAT = 0
    """The heartbeat. Rank 0's never beats on its own host; on others `vllmx rank` beats for it."""
    TAKEN = 1
    """Frames that it has finished with."""
    ARRIVED = 2
    """Calls of the communicator that it has begun; see also `part_bytes` and `bridged`."""
    IDS = 3
    """Checksums of the ids of its last steps, `NUM_CHECKSUMS` words in turn, next to `CHECKED`."""
    CHECKED = 4
    """Steps whose checksum was written."""
    PIECES = 5
    """Pieces from the previous rank that a stage has finished with (`vllmx_tp.communicator`). It
    counts the pieces that it sends in `ARRIVED`."""


RANK_BYTES = len(Word) * LINE_BYTES


class Seats(Record):
    """Neighbouring seats of ranks that communicate, and which of them is the rank's own."""

    first: int
    count: int
    own: int

    @property
    def seat(self) -> int:
        """The rank's own seat in the region."""
        return self.first + self.own

    def neighbour(self, distance: int) -> int:
        """The seat at a distance, cyclically."""
        return self.first + (self.own + distance) % self.count


class Region:
    """One rank's view of the region; the ranks are divided evenly among the stages."""

    def __init__(self, fd: int, num_ranks: int, num_stages: int = 1) -> None:
        self.fd, self.num_ranks, self.num_stages = fd, num_ranks, num_stages
        seats = num_seats(num_ranks, num_stages)
        self.map = mmap.mmap(fd, size_of(num_ranks, num_stages))
        self._bytes = np.frombuffer(self.map, np.uint8)
        self._words = PAGE_BYTES
        self._causes = self._words + _paged(seats * RANK_BYTES)
        self.buffers_at = self._causes + _paged(num_ranks * CAUSE_BYTES)
        ring = self.buffers_at + 2 * seats * BUFFER_BYTES
        self.ring = self._bytes[ring : ring + RING_BYTES]

    @classmethod
    def create(cls, num_ranks: int, num_stages: int = 1) -> Region:
        """Creates a region of zeros. Raises CapacityError if there is no memory for it."""
        fd = os.memfd_create("vllmx-ranks") if hasattr(os, "memfd_create") else _unlinked()
        size = size_of(num_ranks, num_stages)
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
        return cls(fd, num_ranks, num_stages)

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that compute the same layers; those of a stage are neighbours."""
        return self.num_ranks // self.num_stages

    def sums(self, rank: int) -> Seats:
        """The seats of the ranks that add and gather with this one; alone it does neither."""
        each = self.ranks_of_stage
        return Seats(rank - rank % each, each, rank % each)

    def pieces(self, rank: int) -> Seats:
        """The seats of the ranks at the same place in each stage, in order. Needs several stages:
        otherwise pieces would overwrite parts of sums."""
        ranks, stages, each = self.num_ranks, self.num_stages, self.ranks_of_stage
        assert stages > 1, "nothing is handed on in a region of one stage"
        if num_seats(ranks, stages) == ranks:
            return Seats(0, ranks, rank)
        return Seats(ranks + rank % each * stages, stages, rank // each)

    @property
    def address(self) -> int:
        """The address of the region in this process."""
        return int(self._bytes.ctypes.data)

    def word_at(self, seat: int, word: Word) -> int:
        """The offset of a seat's word in bytes."""
        return self._words + seat * RANK_BYTES + word * LINE_BYTES

    def word(self, seat: int, word: Word) -> npt.NDArray[np.uint32]:
        """(1,), written by the seat's rank and readable by all."""
        at = self.word_at(seat, word)
        return self._bytes[at : at + 4].view(np.uint32)

    def checksums(self, rank: int) -> npt.NDArray[np.uint32]:
        """(NUM_CHECKSUMS,) of a rank's sampled ids; entry n % NUM_CHECKSUMS is of step n, counted
        from 0."""
        at = self.word_at(rank, Word.IDS)
        return self._bytes[at : at + 4 * NUM_CHECKSUMS].view(np.uint32)

    def part_bytes(self, seat: int, turn: int) -> npt.NDArray[np.uint32]:
        """(1,) bytes of the part in a seat's buffer of that turn; next to `ARRIVED`, whose second
        word counts the sleepers on the first."""
        at = self.word_at(seat, Word.ARRIVED) + 4 * (2 + turn)
        return self._bytes[at : at + 4].view(np.uint32)

    def bridged(self, seat: int) -> npt.NDArray[np.uint32]:
        """(1,), not zero if a link to another host sleeps until the rank arrives and wakes it."""
        at = self.word_at(seat, Word.ARRIVED) + 16
        return self._bytes[at : at + 4].view(np.uint32)

    @property
    def aborted(self) -> npt.NDArray[np.uint32]:
        """(1,), not zero once the group has ended."""
        return self._bytes[:4].view(np.uint32)

    def abort(self) -> None:
        """Ends the group; a cause is written before."""
        publish(self.aborted, 1)

    def buffer(self, seat: int, turn: int) -> npt.NDArray[np.uint8]:
        """A rank's output buffer for the others."""
        at = self.buffers_at + (2 * seat + turn) * BUFFER_BYTES
        return self._bytes[at : at + BUFFER_BYTES]

    def part(self, rank: int, count: int) -> npt.NDArray[np.uint8]:
        """The memory for a rank's part of call n of the communicator, counted from 1. With two
        ranks, each writes part n + 2 where it read the other's part n: that memory is already in
        its core's caches."""
        seats = self.sums(rank)
        swapped = seats.count == 2 and count & 2
        return self.buffer(seats.neighbour(1) if swapped else seats.seat, count & 1)

    def write_cause(self, rank: int, text: str) -> None:
        """Records why a rank fails, before it aborts the group. Its first cause stays."""
        if not self.cause(rank):
            data = text.encode("utf-8", "backslashreplace")[: CAUSE_BYTES - 1]
            at = self._causes + rank * CAUSE_BYTES
            self._bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def cause(self, rank: int) -> str:
        """A rank's description of its failure; empty: none."""
        at = self._causes + rank * CAUSE_BYTES
        data = self._bytes[at : at + CAUSE_BYTES].tobytes()
        return data.split(b"\0", 1)[0].decode("utf-8", "replace")

    def close(self) -> None:
        """Frees the memory of buffers and ring. Views stay readable: words and causes keep their
        values until the last view is gone, the rest becomes zeros."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if hasattr(mmap, "MADV_REMOVE"):
                size = len(self.map) - self.buffers_at
                self.map.madvise(mmap.MADV_REMOVE, self.buffers_at, size)


def num_seats(num_ranks: int, num_stages: int) -> int:
    """The number of seats: one for each rank, or two if stages have several ranks."""
    return num_ranks if num_stages in (1, num_ranks) else 2 * num_ranks


def size_of(num_ranks: int, num_stages: int) -> int:
    """Bytes of a region."""
    seats = num_seats(num_ranks, num_stages)
    words, causes = _paged(seats * RANK_BYTES), _paged(num_ranks * CAUSE_BYTES)
    return PAGE_BYTES + words + causes + 2 * seats * BUFFER_BYTES + RING_BYTES


def _paged(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _unlinked() -> int:
    fd, path = tempfile.mkstemp(prefix="vllmx-ranks-")
    os.unlink(path)
    return fd
