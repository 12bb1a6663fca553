"""Parts of calls between ranks on their way to another host and back.

Each host has the whole region. A rank puts its part down there and counts itself as arrived, as if
all shared it; a link sends what the ranks of this side put down, and puts down what comes in the
buffers of the ranks of the other side, before it counts those as arrived. So who computes need not
know where the others are. One thread sends and one receives; they wait for nobody but their own
ranks and their own socket, so that the two buffers of a rank are enough here as well.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from vllmx_tp import futex
from vllmx_tp.fill import fill
from vllmx_tp.region import BUFFER_BYTES, Region, Word

_SPINS = 100


class LinkEndedError(Exception):
    """The group has ended, or the other side sends what cannot be; the text says what."""


class Link:
    """A connection for parts.

    Args:
        mine: whose parts go out: all ranks that are not the other side's.
        theirs: whose parts come in.
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
        """The seats at which ranks put down what goes this way."""
        return ranks

    def _works(self) -> list[Callable[[], None]]:
        """What each of its threads does."""
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
        """Closes the connection, by which both threads end."""
        with suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def reason_of(error: Exception) -> str:
    """Why a connection has ended, in some words."""
    if isinstance(error, EOFError):
        return "the other side has hung up"
    return getattr(error, "strerror", None) or str(error)
