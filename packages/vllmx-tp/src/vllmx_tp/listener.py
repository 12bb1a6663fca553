"""The listening socket of a host of ranks, which accepts one rank 0 at a time that has the key."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

from vllmx_tp.handshake import LET_IN, HandshakeError, Purpose, answer

logger = logging.getLogger("vllmx.tp")

MOST_GREETED = 16
"""Concurrent handshakes."""
_LOOK_S = 0.5


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
    """Listens for as long as its socket is open.

    Each connection has its own thread for the handshake, since clients without the key may be slow.
    If there are `MOST_GREETED`, the oldest is dropped for a new one: a client with the key is
    quick, and reconnects.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._callers: SimpleQueue[Caller | None] = SimpleQueue()
        self._caller: Caller | None = None
        self._greeted: list[socket.socket] = []
        self._turn, self._places = threading.Lock(), threading.Semaphore(MOST_GREETED)
        listener.settimeout(_LOOK_S)  # nothing wakes `accept` where its socket is closed
        threading.Thread(target=self._listen, name="vllmx-door", daemon=True).start()

    def caller(self) -> Caller | None:
        """Waits for the next rank 0, which owns the host until `leave`; None: the socket was
        closed."""
        return self._callers.get()

    def leave(self, caller: Caller) -> None:
        """Frees the host for another rank 0."""
        with self._turn:
            self._caller = None
        caller.close()

    def _listen(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, (address, *_) = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._listener.fileno() >= 0:
                    logger.warning("nobody can be let in: %s", error)
                    time.sleep(_LOOK_S)
                continue
            self._make_room()
            with self._turn:
                self._greeted.append(connection)
            greet = threading.Thread(target=self._greet, args=(connection, address), daemon=True)
            greet.start()
        self._callers.put(None)

    def _make_room(self) -> None:
        """Waits for a free place, dropping the oldest handshake if there is none."""
        if self._places.acquire(blocking=False):
            return
        with self._turn:
            for oldest in self._greeted[:1]:
                with suppress(OSError):  # it has hung up
                    oldest.shutdown(socket.SHUT_RDWR)
        self._places.acquire()

    def _greet(self, connection: socket.socket, address: str) -> None:
        is_let_in = False
        try:
            try:
                purpose, group = answer(connection, self._key)
            finally:
                with self._turn:
                    self._greeted.remove(connection)
                self._places.release()
            is_let_in = self._let_in(connection, purpose, group)
            if not is_let_in:
                logger.debug("hung up on %s: this host serves another group", address)
        except (HandshakeError, OSError) as error:
            logger.warning("refused %s: %s", address, error)
        finally:
            if not is_let_in:
                connection.close()

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
