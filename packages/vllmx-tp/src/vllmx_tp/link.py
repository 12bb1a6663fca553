"""Links, which copy the parts and pieces of ranks between two hosts.

Each host has the whole region, and ranks use it as if all shared it. A link sends what ranks of
this side write, and writes what it receives into the buffers of the other side's ranks before it
counts those as arrived. So ranks do not know where the others are.

Parts of sums and gathers: one thread sends and one receives. They wait only for their own ranks and
socket, so that two buffers per rank are enough here too.

Pieces between stages: a link also sends how many pieces a rank of this side has taken. Rank 0's
host has a link to each of the others and forwards between them: it writes what one link brings as
if its rank were here. A rank writes piece n once its reader has taken piece n - 2, so two buffers
are enough here too.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
from vllmx_core.config import EngineConfig
from vllmx_core.system.handshake import fill

from vllmx_tp import futex
from vllmx_tp.region import BUFFER_BYTES, Region, Word

_SPINS = 100


class LinkEndedError(Exception):
    """The group has ended, or the other side has sent invalid data."""


class Link:
    """A connection for parts.

    Args:
        mine: the ranks whose parts are sent: all that are not the other side's.
        theirs: the ranks whose parts are received.
        on_end: called from a thread of the link when the connection breaks, with the reason.
    """

    def __init__(
        self,
        region: Region,
        connection: socket.socket,
        mine: Sequence[int],
        theirs: Sequence[int],
        on_end: Callable[[str], None],
    ) -> None:
        self._region, self._socket, self._on_end = region, connection, on_end
        self._ranks = mine
        self._mine, self._theirs = self._seats_of(mine), self._seats_of(theirs)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for seat in self._mine:
            region.bridged(seat)[0] = 1  # the rank wakes this link from now on
        for work in self._works():
            name = "vllmx-link"
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()

    def _seats_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """The seats whose buffers this link copies."""
        return ranks

    def _works(self) -> list[Callable[[], None]]:
        """The function of each thread."""
        return [self._send, self._receive]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (LinkEndedError, OSError, EOFError) as error:
            if not self._region.aborted[0]:
                self._on_end(reason_of(error))

    def _send(self) -> None:
        count, region = 0, self._region
        header = struct.Struct(f"<{1 + len(self._mine)}I")
        arrived = [region.word(rank, Word.ARRIVED) for rank in self._mine]
        while True:
            count = (count + 1) & 0xFFFFFFFF
            turn = count & 1
            for word in arrived:
                self._wait(word, count)
            sizes = [int(region.part_bytes(rank, turn)[0]) for rank in self._mine]
            message = bytearray(header.pack(count, *sizes))
            for rank, size in zip(self._mine, sizes, strict=True):
                message += region.part(rank, count)[:size].data
            self._socket.sendall(message)

    def _wait(self, word: npt.NDArray[np.uint32], count: int) -> None:
        looks = 0
        while futex.is_behind(seen := int(word[0]), count):
            if self._region.aborted[0]:
                raise LinkEndedError
            looks += 1
            if looks > _SPINS:
                futex.wait_while(word, seen)
        futex.fence()

    def _receive(self) -> None:
        region = self._region
        header = struct.Struct(f"<{1 + len(self._theirs)}I")
        head = bytearray(header.size)
        while True:
            self._fill(memoryview(head))
            count, *sizes = header.unpack(head)
            turn = count & 1
            for rank, size in zip(self._theirs, sizes, strict=True):
                self._fill_buffer(region.part(rank, count), size)
                region.part_bytes(rank, turn)[0] = size  # for those to whom it is passed on
            for rank in self._theirs:
                word = region.word(rank, Word.ARRIVED)
                futex.publish(word, count)
                futex.wake(word)

    def _fill_buffer(self, buffer: npt.NDArray[np.uint8], size: int) -> None:
        """Receives a part of so many bytes. Raises LinkEndedError, OSError, EOFError."""
        if size > BUFFER_BYTES:
            raise LinkEndedError(
                f"it sends a part of {size} bytes, more than the {BUFFER_BYTES} of a buffer"
            )
        self._fill(buffer[:size].data)

    def _fill(self, view: memoryview) -> None:
        fill(view, self._socket.recv_into)

    def close(self) -> None:
        """Closes the connection, which ends both threads."""
        with suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def reason_of(error: Exception) -> str:
    """A short reason why a connection has ended."""
    if isinstance(error, EOFError):
        return "the other side has hung up"
    return getattr(error, "strerror", None) or str(error)


_HEAD = struct.Struct("<4I")
"""The head of a message: the word, the seat, its count, and the bytes of the piece that follows."""


class StageLink(Link):
    """A connection for pieces; its arguments are those of `Link`."""

    def _works(self) -> list[Callable[[], None]]:
        self._turn = threading.Lock()
        return [
            *(partial(self._send_pieces, seat) for seat in self._neighbours(1)),
            *(partial(self._send_taken, seat) for seat in self._neighbours(-1)),
            self._receive,
        ]

    def _seats_of(self, ranks: Sequence[int]) -> list[int]:
        return [self._region.pieces(rank).seat for rank in ranks]

    def _neighbours(self, distance: int) -> list[int]:
        """Seats of this side whose neighbour, `distance` seats on, is on the other side."""
        ends = (self._region.pieces(rank) for rank in self._ranks)
        return [one.seat for one in ends if one.neighbour(distance) in self._theirs]

    def _send_pieces(self, seat: int) -> None:
        """Sends each piece of a rank once."""
        region, count = self._region, 0
        arrived = region.word(seat, Word.ARRIVED)
        while True:
            count = (count + 1) & 0xFFFFFFFF
            self._wait(arrived, count)
            size = int(region.part_bytes(seat, count & 1)[0])
            message = bytearray(_HEAD.pack(Word.ARRIVED, seat, count, size))
            message += region.buffer(seat, count & 1)[:size].data
            self._tell(message)

    def _send_taken(self, seat: int) -> None:
        """Sends counts of taken pieces, skipping older ones."""
        word, count = self._region.word(seat, Word.PIECES), 0
        while True:
            self._wait(word, (count + 1) & 0xFFFFFFFF)
            count = int(word[0])
            self._tell(_HEAD.pack(Word.PIECES, seat, count, 0))

    def _tell(self, message: bytes | bytearray) -> None:
        with self._turn:
            self._socket.sendall(message)

    def _receive(self) -> None:
        region = self._region
        head = bytearray(_HEAD.size)
        while True:
            self._fill(memoryview(head))
            kind, seat, count, size = _HEAD.unpack(head)
            if kind not in (Word.ARRIVED, Word.PIECES) or seat not in self._theirs:
                seats = ", ".join(map(str, self._theirs))
                raise LinkEndedError(
                    f"it sends word {kind} of seat {seat}, which is none of its words"
                    f" {Word.ARRIVED:d} and {Word.PIECES:d} of seats {seats}"
                )
            if kind == Word.ARRIVED:
                self._fill_buffer(region.buffer(seat, count & 1), size)
                region.part_bytes(seat, count & 1)[0] = size  # for those to whom it is passed on
            word = region.word(seat, Word(kind))
            futex.publish(word, count)
            futex.wake(word)


def link_of(config: EngineConfig) -> type[Link]:
    """The kind of link that ranks of a configuration need."""
    return StageLink if config.pipeline_parallel_size > 1 else Link
