"""Calls between ranks through memory that the ranks of a host share.

In a sum or a gather, each rank writes its part and reads all parts when all have arrived; a link
brings those of other hosts. Between stages, and from the last stage to rank 0, bytes go in pieces,
which stay in one of the sender's two buffers until the receiver has taken them. The CPU backend's
native code does the same with the same words.
"""

from __future__ import annotations

import operator
import struct
import time
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from vllmx_core.communicator import SharedAddresses, tree_sum
from vllmx_core.errors import RankLostError
from vllmx_core.plan import AnyArray

from vllmx_tp import futex
from vllmx_tp.region import BUFFER_BYTES, RANK_BYTES, Region, Seats, Word

_SPINS = 200
"""Polls of the others before the first sleep."""
_SLEEP_S = 50e-6
_SIZE = struct.Struct("<Q")
Bytes = npt.NDArray[np.uint8]


class _End:
    """The state that both ends share; `sender` and `receiver` are their seats."""

    def __init__(self, region: Region, sender: int, receiver: int) -> None:
        self._region, self._sender = region, sender
        self._sent = region.word(sender, Word.ARRIVED)
        self._taken = region.word(receiver, Word.PIECES)
        self._buffers = [region.buffer(sender, turn) for turn in (0, 1)]
        self._aborted = region.aborted
        self._count = 0

    def _wait(self, word: npt.NDArray[np.uint32], count: int) -> None:
        """Waits until a word has reached `count`. Raises RankLostError if the group has ended."""
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
        super().__init__(region, seats.seat, seats.neighbour(1))

    def send(self, x: AnyArray) -> None:
        """Sends an array without its shape."""
        flat: Bytes = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), BUFFER_BYTES):
            self._put(flat[begin : begin + BUFFER_BYTES])

    def send_message(self, data: bytes) -> None:
        """Sends bytes with their length."""
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
        super().__init__(region, seats.neighbour(-1), seats.seat)

    def recv(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """The next array, which had this shape and type."""
        found = np.empty(shape, dtype)
        flat: Bytes = found.reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), BUFFER_BYTES):
            self._take(flat[begin : begin + BUFFER_BYTES])
        return found

    def recv_message(self) -> bytes:
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


class SharedMemoryCommunicator:
    """A `vllmx_core.communicator.Communicator`. A rank's two buffers alternate: before it writes
    part n + 2 it has seen all others arrive at n + 1, so they have read part n."""

    def __init__(self, region: Region, rank: int) -> None:
        self._region, self._seats, self._place = region, region.sums(rank), rank
        self._rank, self._seat = self._seats.own, self._seats.seat
        seats = range(self._seats.first, self._seats.first + self._seats.count)
        self._arrived = [region.word(one, Word.ARRIVED) for one in seats]
        self._parts = [[region.part(one, count) for count in range(4)] for one in seats]
        self._aborted, self._bridged = region.aborted, region.bridged(self._seat)
        self._count = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return self._seats.count

    @property
    def shared(self) -> SharedAddresses:
        pieces = None if self._region.num_stages == 1 else self._region.pieces(self._place)
        stages = None if pieces is None else self._addresses(pieces, None)
        return self._addresses(self._seats, stages)

    @cached_property
    def _outgoing(self) -> Outgoing:
        return Outgoing(self._region, self._place)

    @cached_property
    def _incoming(self) -> Incoming:
        return Incoming(self._region, self._place)

    def _addresses(self, seats: Seats, stages: SharedAddresses | None) -> SharedAddresses:
        region, address = self._region, self._region.address
        return SharedAddresses(
            seats.own,
            seats.count,
            abort=address,
            arrived=address + region.word_at(seats.first, Word.ARRIVED),
            arrived_stride=RANK_BYTES,
            buffers=address + region.buffers_at + 2 * seats.first * BUFFER_BYTES,
            buffer_bytes=BUFFER_BYTES,
            taken=address + region.word_at(seats.first, Word.PIECES),
            stages=stages,
        )

    def all_reduce(self, x: AnyArray) -> AnyArray:
        flat = np.ascontiguousarray(x).reshape(-1)
        total = np.empty_like(flat)
        size = BUFFER_BYTES // flat.itemsize
        for begin in range(0, len(flat), size):
            piece = flat[begin : begin + size]
            parts = self._exchange(piece, [len(piece)] * self.num_ranks)
            total[begin : begin + size] = tree_sum(parts, operator.add)
        return total.reshape(x.shape)

    def sum_rows(self, x: AnyArray, held: npt.NDArray[np.bool_]) -> AnyArray:
        out, ranks = np.empty_like(x), self.num_ranks
        rows = BUFFER_BYTES // (x.itemsize * x.shape[1])
        for begin in range(0, len(x), rows):
            piece, has = np.ascontiguousarray(x[begin : begin + rows]), held[begin : begin + rows]
            ends = [len(piece) * rank // ranks for rank in range(ranks + 1)]
            mine = slice(ends[self._rank], ends[self._rank + 1])
            total = np.zeros_like(piece[mine])
            parts = self._exchange(piece.reshape(-1), [piece.size] * ranks)
            for part, own in zip(parts, has[mine].T, strict=True):
                total[own] += part.reshape(piece.shape)[mine][own]
            sizes = [x.shape[1] * (end - first) for first, end in pairwise(ends)]
            sums = np.concatenate(self._exchange(total.reshape(-1), sizes))
            out[begin : begin + rows] = sums.reshape(piece.shape)
        return out

    def all_gather(self, x: AnyArray, widths: Sequence[int]) -> AnyArray:
        out = np.empty((len(x), sum(widths)), x.dtype)
        rows = BUFFER_BYTES // (x.itemsize * max(widths))
        assert rows, f"a row of {max(widths)} numbers does not fit into {BUFFER_BYTES} bytes"
        for begin in range(0, len(x), rows):
            piece = np.ascontiguousarray(x[begin : begin + rows]).reshape(-1)
            count = min(rows, len(x) - begin)
            parts = self._exchange(piece, [count * width for width in widths])
            ends = np.cumsum(widths)
            for part, end, width in zip(parts, ends, widths, strict=True):
                out[begin : begin + count, end - width : end] = part.reshape(count, width)
        return out

    def send(self, x: AnyArray) -> None:
        self._outgoing.send(x)

    def recv(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        return self._incoming.recv(shape, dtype)

    def _exchange(self, piece: AnyArray, sizes: Sequence[int]) -> list[AnyArray]:
        """Returns every rank's part, `sizes` numbers each, valid until this rank's next call."""
        assert self.num_ranks > 1, "a rank alone would count pieces for the next stage as its parts"
        self._count = (self._count + 1) & 0xFFFFFFFF
        parts = [of_rank[self._count & 3] for of_rank in self._parts]
        parts[self._rank][: piece.nbytes].view(piece.dtype)[:] = piece
        self._region.part_bytes(self._seat, self._count & 1)[0] = piece.nbytes
        futex.publish(self._arrived[self._rank], self._count)
        if self._bridged[0]:
            futex.wake(self._arrived[self._rank])
        self._wait()
        return [
            part[: size * piece.itemsize].view(piece.dtype)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _wait(self) -> None:
        looks = 0
        for arrived in self._arrived:
            while futex.is_behind(int(arrived[0]), self._count):
                if self._aborted[0]:
                    raise RankLostError("the other ranks have ended")
                looks += 1
                time.sleep(0 if looks < _SPINS else _SLEEP_S)
        futex.fence()
