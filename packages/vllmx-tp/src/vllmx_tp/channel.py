"""Sends frames from rank 0 to the others: a shared ring buffer holds them, a socket says where."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from vllmx_core.plan import I32
from vllmx_core.system.handshake import fill

from vllmx_tp.frames import AnyFrame
from vllmx_tp.futex import publish
from vllmx_tp.messages import INLINE, NOTICE, Call
from vllmx_tp.region import RING_BYTES, Region, Word

_ALIGNMENT = 64


class Ring:
    """Places for frames, which are released in the order in which they were placed.

    Args:
        size: bytes of the ring.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._frames: deque[tuple[int, int]] = deque()
        """(begin, end) of frames that some reader still needs, the oldest first."""
        self._num_released = 0

    def fits(self, size: int) -> bool:
        """True if a frame of that size fits once readers have taken enough."""
        return size <= self._size // 2

    def release(self, num_taken: int) -> None:
        """Frees the frames that all readers have taken, given their number since the beginning."""
        while self._frames and self._num_released < num_taken:
            self._frames.popleft()
            self._num_released += 1

    def place(self, size: int) -> int | None:
        """Places a frame and returns its first byte; None if there is no room yet. An empty ring
        restarts at its beginning, which is still in the caches."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        begin: int | None = 0
        if self._frames:
            oldest, newest = self._frames[0][0], self._frames[-1][1]
            if newest <= oldest:  # it has begun from the front
                begin = newest if newest + size < oldest else None
            elif newest + size <= self._size:
                begin = newest
            else:
                begin = 0 if size < oldest else None
        if begin is not None:
            self._frames.append((begin, begin + size))
        return begin


_WAIT_S = 20e-6


class Sender:
    """The end of a host's first process.

    Args:
        region: the memory that the ranks share.
        ranks: the readers.
        sockets: one to each reader, in the order of the ranks; more may be added until the first
            frame.
        check: raises if a reader is gone; called while the sender waits for room.
    """

    def __init__(
        self,
        region: Region,
        ranks: Sequence[int],
        sockets: Sequence[socket.socket],
        check: Callable[[], None],
    ) -> None:
        self._bytes, self._sockets, self._check = region.ring, sockets, check
        self._ring = Ring(RING_BYTES)
        self._num_placed = 0
        self._taken = [region.word(rank, Word.TAKEN) for rank in ranks]

    def send(self, call: Call, frame: AnyFrame) -> None:
        """Sends a frame to all readers. Raises OSError if one has hung up."""
        size = 4 * frame.num_words
        at = self._place(size)
        if at is None:
            self.tell(NOTICE.pack(call, size, INLINE) + frame.to_bytes())
        else:
            frame.write(self._bytes[at : at + size].view(np.int32))
            self._num_placed += 1
            self.tell(NOTICE.pack(call, size, at))

    def tell(self, data: bytes) -> None:
        for one in self._sockets:
            one.sendall(data)

    def _place(self, size: int) -> int | None:
        """Waits for a place in the ring; None if the frame is too large for the ring."""
        if not self._ring.fits(size):
            return None
        while True:
            self._ring.release(self._num_taken())
            at = self._ring.place(size)
            if at is not None:
                return at
            self._check()
            time.sleep(_WAIT_S)

    def _num_taken(self) -> int:
        """Frames of the ring that every reader has taken."""
        behind = max(
            ((self._num_placed - int(word[0])) & 0xFFFFFFFF for word in self._taken), default=0
        )
        return self._num_placed - behind


class Reader:
    """Notices and frames from rank 0."""

    def __init__(self, connection: socket.socket, region: Region, rank: int) -> None:
        self._connection = connection
        self._words: I32 = region.ring.view(np.int32)
        self._taken = region.word(rank, Word.TAKEN)
        self._placed = False
        self._notice = bytearray(NOTICE.size)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @property
    def has_more(self) -> bool:
        """True if a call has arrived that was not read."""
        return bool(self._poll.poll(0))

    def read(self, spin_s: float = 0.0, most_s: float | None = None) -> tuple[Call, I32]:
        """The next call and its frame, which stays valid until `release`. Polls for `spin_s` before
        it sleeps. Raises EOFError if rank 0 is gone, TimeoutError if no call comes within
        `most_s`."""
        end_s = time.monotonic() + spin_s if spin_s else 0.0
        while spin_s and not self.has_more and time.monotonic() < end_s:
            pass
        notice = memoryview(self._notice)
        if most_s is not None:
            notice = notice[self._begun(notice, most_s) :]
        fill(notice, self._connection.recv_into)
        call, size, at = NOTICE.unpack(self._notice)
        self._placed = at != INLINE
        if self._placed:
            return Call(call), self._words[at // 4 : (at + size) // 4]
        data = bytearray(size)
        fill(memoryview(data), self._connection.recv_into)
        return Call(call), np.frombuffer(data, np.int32)

    def release(self) -> None:
        """Releases the last frame."""
        if self._placed:
            publish(self._taken, (int(self._taken[0]) + 1) & 0xFFFFFFFF)

    def _begun(self, notice: memoryview, most_s: float) -> int:
        """Returns the bytes of a notice that have already arrived, or 0 once it begins to arrive
        within `most_s`. If it is there, this adds no system calls to a read without a limit."""
        try:
            count = self._connection.recv_into(notice, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not self._poll.poll(1000 * most_s):
                raise TimeoutError(f"no call within {most_s} s") from None
            return 0
        if not count:
            raise EOFError
        return count
