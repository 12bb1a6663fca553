"""The supervisor accepts connections and hands each to the worker with the fewest.

If workers accepted from a shared socket, the first to wake would take all that wait: of 60 streams,
one of three workers got 41 and another 2.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllmx_server.host.workers.shared_counts import SharedCounts, SharedGauge
from vllmx_server.http.connections.settings import OUT_OF_RESOURCES

logger = logging.getLogger("vllmx.supervisor")

_AT_ONCE = 16
"""Connections accepted in one turn of the event loop, and the most in one mailbox: a worker that
hangs gets no more."""
_PAUSE_S = 0.02
"""The pause while no worker can take a connection."""


class Dispatcher:
    """Hands connections to workers, by mailboxes that outlive them.

    Args:
        listening: the socket of the server.
        listen: makes it listen; called when the first worker serves.
        counts: counts of all workers.
    """

    def __init__(
        self,
        listening: socket.socket,
        listen: Callable[[], None],
        counts: SharedCounts,
        size: int,
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._listen: Callable[[], None] | None = listen
        self._counts = counts
        self._pairs = [socket.socketpair() for _ in range(size)]
        for pair in self._pairs:
            for each in pair:
                each.setblocking(False)
        self._handed = [0] * size
        self._serving: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        self._is_closed = False

    def mailbox(self, row: int) -> int:
        """The descriptor for a worker's `Mailbox`."""
        return self._pairs[row][1].fileno()

    def opened(self, row: int) -> None:
        """A worker has begun to serve."""
        if self._is_closed:
            return
        if self._listen is not None:
            self._listen()
            self._listen = None
        self._serving.add(row)
        self._resume()

    def left(self, row: int) -> None:
        """A worker has ended: hands the connections in its mailbox to others."""
        self._serving.discard(row)
        self._handed[row] = 0
        mailbox = self._pairs[row][1]
        with suppress(BlockingIOError):
            while not self._is_closed:
                with _received(mailbox) as connection:
                    self._hand(connection)

    def stop(self) -> None:
        """Accepts nothing more."""
        self._is_closed = True
        self._pause(None)

    def close(self) -> None:
        """Drops the connections in mailboxes."""
        self.stop()
        for pair in self._pairs:
            for each in pair:
                each.close()

    # --- inside -----------------------------------------------------------------------------------
    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if self._next() is None:
                self._pause(_PAUSE_S)
                return
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                logger.warning("no connection can be accepted: %s", error.strerror)
                self._pause(1.0)
                return
            with connection:
                self._hand(connection)

    def _hand(self, connection: socket.socket) -> None:
        """Hands it to the worker with the fewest, or drops it if all mailboxes are full."""
        row = self._next()
        if row is None:
            return
        try:
            socket.send_fds(self._pairs[row][0], [b"."], [connection.fileno()])
        except OSError as error:
            logger.warning("a connection could not be handed to an API process: %s", error)
        else:
            self._handed[row] += 1

    def _next(self) -> int | None:
        """The worker with the fewest connections among those with room in their mailboxes."""
        found = [
            (self._counts.value("connections", row) + untaken, row)
            for row in self._serving
            if (untaken := self._handed[row] - self._counts.value("received", row)) < _AT_ONCE
        ]
        return min(found)[1] if found else None

    def _pause(self, seconds: float | None) -> None:
        self._loop.remove_reader(self._listening.fileno())
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if seconds is not None:
            self._resuming = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause(None)
        self._loop.add_reader(self._listening.fileno(), self._accept)


class Mailbox(socket.socket):
    """A worker's substitute for a listening socket."""

    def __init__(self, descriptor: int, received: SharedGauge) -> None:
        super().__init__(fileno=descriptor)
        self._received = received
        self._count = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.socket.accept`. ConnectionAbortedError: the client has left."""
        connection = _received(self)
        self._count += 1
        self._received.set(self._count)
        try:
            return connection, connection.getpeername()
        except OSError:
            connection.close()
            raise ConnectionAbortedError from None


def _received(mailbox: socket.socket) -> socket.socket:
    """The next connection. Raises BlockingIOError; OSError where the process has no descriptors."""
    data, descriptors, _, _ = socket.recv_fds(mailbox, 1, 1)
    if not data:
        raise BlockingIOError  # the supervisor is gone, and this process exits
    if not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    connection = socket.socket(fileno=descriptors[0])
    connection.set_inheritable(False)
    return connection
