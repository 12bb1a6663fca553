"""One rank's end of calls between ranks: it puts its part into memory that its host's ranks share,
and reads all parts when all have arrived. A link brings those of other hosts."""

from __future__ import annotations

import operator
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
from vllmx_tp.wire import Incoming, Outgoing

_SPINS = 200
"""Looks at the others before the first sleep."""
_SLEEP_S = 50e-6


class SharedMemoryCommunicator:
    """A `vllmx_core.communicator.Communicator`. Two buffers of a rank take turns: who puts down
    part n + 2 has seen all others arrive at n + 1, which they do when they have read part n."""

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
        """See `Communicator.shared`."""
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
        """See `Communicator.all_reduce`."""
        flat = np.ascontiguousarray(x).reshape(-1)
        total = np.empty_like(flat)
        size = BUFFER_BYTES // flat.itemsize
        for begin in range(0, len(flat), size):
            piece = flat[begin : begin + size]
            parts = self._exchange(piece, [len(piece)] * self.num_ranks)
            total[begin : begin + size] = tree_sum(parts, operator.add)
        return total.reshape(x.shape)

    def sum_rows(self, x: AnyArray, held: npt.NDArray[np.bool_]) -> AnyArray:
        """See `Communicator.sum_rows`."""
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
        """See `Communicator.all_gather`."""
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
        """See `Communicator.send`."""
        self._outgoing.send(x)

    def recv(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """See `Communicator.recv`."""
        return self._incoming.recv(shape, dtype)

    def _exchange(self, piece: AnyArray, sizes: Sequence[int]) -> list[AnyArray]:
        """What every rank put down, `sizes` numbers each, until this rank's next call."""
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
