"""The listening socket of a host of ranks, which accepts one rank 0 at a time that has the key."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from queue import SimpleQueue

from vllmx_core.system.greeter import Greeter
from vllmx_core.system.handshake import LET_IN

from vllmx_tp.messages import RANKS, Purpose

logger = logging.getLogger("vllmx.tp")


class Caller:
    """An accepted rank 0.

    Attributes:
        group: the name of its group.
        steps: its first connection.
        parts: receives its second one, or None once that is no longer awaited.
    """

    def __init__(self, group: bytes, steps: socket.socket) -> None:
        self.group, self.steps = group, steps
        self.parts: SimpleQueue[socket.socket | None] = SimpleQueue()
        self.is_whole = False

    def awaits(self, group: bytes) -> bool:
        """True if the second connection of that group is still missing."""
        return self.group == group and not self.is_whole

    def close(self) -> None:
        """Closes the connections, also an untaken one in `parts`."""
        with suppress(OSError):  # it is gone
            self.steps.shutdown(socket.SHUT_RDWR)  # which ends the read that a thread waits in
        self.steps.close()
        while not self.parts.empty():
            connection = self.parts.get()
            if connection is not None:
                connection.close()


class RankListener:
    """Lets one rank 0 at a time in, for as long as its socket is open."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._callers: SimpleQueue[Caller | None] = SimpleQueue()
        self._caller: Caller | None = None
        self._turn = threading.Lock()
        Greeter(listener, key, RANKS, self._let_in, logger, lambda: self._callers.put(None))

    def caller(self) -> Caller | None:
        """Waits for the next rank 0, which owns the host until `leave`; None: the socket was
        closed."""
        return self._callers.get()

    def leave(self, caller: Caller) -> None:
        """Frees the host for another rank 0."""
        with self._turn:
            self._caller = None
        caller.close()

    def _let_in(self, connection: socket.socket, purpose: int, group: bytes) -> bool:
        """True if it is the first connection of a group and the host is free, or the second one of
        the group that it serves. Raises OSError."""
        with self._turn:
            caller = self._caller
            if purpose == Purpose.STEPS and caller is None:
                caller = Caller(group, connection)
                connection.sendall(LET_IN)  # a byte, for which there is room
                self._caller = caller
                self._callers.put(caller)
                return True
            if purpose == Purpose.PARTS and caller is not None and caller.awaits(group):
                connection.sendall(LET_IN)
                caller.is_whole = True
                caller.parts.put(connection)
                return True
        return False
