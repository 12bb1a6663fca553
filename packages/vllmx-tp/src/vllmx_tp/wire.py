"""The way from a rank of a stage to that of the next one, and from the last stage to rank 0.

Pieces of bytes lie in the buffers of the rank that sends, two in turn, until the next rank has
taken them. The CPU backend's native code does the same to the same words.
"""

from __future__ import annotations

import struct
import time

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import RankLostError
from vllmx_core.plan import AnyArray

from vllmx_tp import futex
from vllmx_tp.region import BUFFER_BYTES, Region, Word

_SPINS = 200
"""Looks before the first sleep."""
_SIZE = struct.Struct("<Q")
Bytes = npt.NDArray[np.uint8]


class _End:
    """What both ends have in common; `sender` and `receiver` are their seats."""

    def __init__(self, region: Region, sender: int, receiver: int) -> None:
        self._region, self._sender = region, sender
        self._sent = region.word(sender, Word.ARRIVED)
        self._taken = region.word(receiver, Word.PIECES)
        self._buffers = [region.buffer(sender, turn) for turn in (0, 1)]
        self._aborted = region.aborted
        self._count = 0

    def _wait(self, word: npt.NDArray[np.uint32], count: int) -> None:
        """Waits until a word has come so far. Raises RankLostError where it never will."""
        looks = 0
        while futex.is_behind(seen := int(word[0]), count):
            if self._aborted[0]:
                raise RankLostError("the other ranks have ended")
            looks += 1
            if looks < _SPINS:
                time.sleep(0)
            else:
                futex.wait_while(word, seen)
        futex.fence()


class Outgoing(_End):
    """The end of a rank that sends to the next stage."""

    def __init__(self, region: Region, rank: int) -> None:
        seats = region.pieces(rank)
        super().__init__(region, seats.seat, seats.beside(1))

    def send(self, x: AnyArray) -> None:
        """An array, without its shape."""
        flat: Bytes = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), BUFFER_BYTES):
            self._put(flat[begin : begin + BUFFER_BYTES])

    def send_message(self, data: bytes) -> None:
        """Bytes whose number the reader does not know."""
        self.send(np.frombuffer(_SIZE.pack(len(data)) + data, np.uint8))

    def _put(self, piece: Bytes) -> None:
        self._count = (self._count + 1) & 0xFFFFFFFF
        self._wait(self._taken, (self._count - 2) & 0xFFFFFFFF)
        turn = self._count & 1
        self._buffers[turn][: len(piece)] = piece
        self._region.part_bytes(self._sender, turn)[0] = len(piece)
        futex.publish(self._sent, self._count)
        futex.wake(self._sent)


class Incoming(_End):
    """The end of a rank that receives from the stage before."""

    def __init__(self, region: Region, rank: int) -> None:
        seats = region.pieces(rank)
        super().__init__(region, seats.beside(-1), seats.seat)

    def recv(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """The next array, which had this shape and type."""
        found = np.empty(shape, dtype)
        flat: Bytes = found.reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), BUFFER_BYTES):
            self._take(flat[begin : begin + BUFFER_BYTES])
        return found

    def recv_message(self) -> bytes:
        """The next message."""
        self._count = (self._count + 1) & 0xFFFFFFFF
        self._wait(self._sent, self._count)
        turn = self._count & 1
        piece = self._buffers[turn][: int(self._region.part_bytes(self._sender, turn)[0])]
        (size,) = _SIZE.unpack_from(piece.data)
        found = np.empty(_SIZE.size + size, np.uint8)
        found[: len(piece)] = piece
        self._free()
        for begin in range(len(piece), len(found), BUFFER_BYTES):
            self._take(found[begin : begin + BUFFER_BYTES])
        return found[_SIZE.size :].tobytes()

    def _take(self, room: Bytes) -> None:
        self._count = (self._count + 1) & 0xFFFFFFFF
        self._wait(self._sent, self._count)
        room[:] = self._buffers[self._count & 1][: len(room)]
        self._free()

    def _free(self) -> None:
        futex.publish(self._taken, self._count)
        futex.wake(self._taken)
