"""Pieces that stages of a model send, on their way to another host and back.

Each host has the whole region, as it is for ranks that add (`vllmx_tp.link`). A link sends what a
rank of this side puts down for one of the other side, and of a rank of this side how many pieces
it has taken from one of the other side. Rank 0's host has a link to each of the others and passes
on what these send each other: what comes in by one link is put down there as if its rank were here.
A rank puts piece n down when piece n - 2 was taken where it is read, so two buffers are enough on
the way as well.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial

from vllmx_core.config import EngineConfig

from vllmx_tp import futex
from vllmx_tp.link import Link, LinkEndedError
from vllmx_tp.region import Word

_HEAD = struct.Struct("<4I")
"""The head of a word: which one it is, the seat, its count, and the bytes of the piece behind it.
"""


class StageLink(Link):
    """A connection for pieces; its arguments are those of `Link`."""

    def _works(self) -> list[Callable[[], None]]:
        self._turn = threading.Lock()
        return [
            *(partial(self._send_pieces, seat) for seat in self._beside(1)),
            *(partial(self._send_taken, seat) for seat in self._beside(-1)),
            self._receive,
        ]

    def _seats_of(self, ranks: Sequence[int]) -> list[int]:
        return [self._region.pieces(rank).seat for rank in ranks]

    def _beside(self, distance: int) -> list[int]:
        """Seats of this side whose neighbour, `distance` seats on, is on the other side."""
        ends = (self._region.pieces(rank) for rank in self._ranks)
        return [one.seat for one in ends if one.beside(distance) in self._theirs]

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
        """Sends the newest count alone."""
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
