"""The core's listening socket and its connections, each with an outbox and a receiving thread."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from vllmx_engine.core.core_loop import Client, Inbox, Joined, Left, Said, prefix_of
from vllmx_engine.wire.ipc import (
    FrameError,
    FrameReader,
    FrameTooLargeError,
    FromCore,
    Outputs,
    Ping,
    Pong,
    Ready,
    ToCore,
    encode_frame,
    to_core_decoder,
)
from vllmx_engine.wire.messages import CoreInfo, CoreOutput
from vllmx_engine.wire.outbox import Outbox, Updates

_RECEIVE_BYTES = 1 << 18
_FAREWELL_S = 2.0
_LOOK_S = 0.005


class CoreSocket:
    """Messages over a connected socket. Any thread may send; one receives.

    What a client that reads is sent goes straight to the kernel. For one that does not, what comes
    later is merged until it reads again.

    Args:
        on_broken: called when the peer no longer reads.
    """

    def __init__(self, connection: socket.socket, on_broken: Callable[[], None]) -> None:
        self._socket = connection
        self._updates = Updates()
        self._lock = threading.Lock()
        self._outbox = Outbox(connection, on_broken, self._send_updates)

    def messages(self) -> Iterator[ToCore]:
        """Messages as they come, until the other side is gone. Raises FrameError."""
        reader: FrameReader[ToCore] = FrameReader(to_core_decoder)
        while data := self._socket.recv(_RECEIVE_BYTES):
            yield from reader.feed(data)

    def send(self, message: FromCore) -> bool:
        """Sends a message and never waits. Returns False when the other side has not read for so
        long that nothing more should be made for it."""
        with self._lock:
            if self._updates or not self._outbox.is_empty:
                return self._updates.add(message)
            return self._put(message)

    def flush(self) -> None:
        """Gives the other side a moment to read the last words."""
        until_s = time.monotonic() + _FAREWELL_S
        while self._outbox.flush(until_s - time.monotonic()) and self._updates:
            time.sleep(_LOOK_S)  # until the outbox's thread has taken them

    def close(self) -> None:
        """Closes the socket, which also wakes the receiving thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_updates(self) -> None:
        with self._lock:
            for message in self._updates.take():
                self._put(message)

    def _put(self, message: FromCore) -> bool:
        try:
            frame = encode_frame(message)
        except FrameTooLargeError:
            if not isinstance(message, Outputs):
                raise
            taken = [self._put(part) for part in _smaller(message)]
            return all(taken)
        return self._outbox.put(frame)


def _smaller(message: Outputs) -> list[Outputs]:
    """The same updates in two messages; one that is too large alone becomes an error."""
    outputs = message.outputs
    if len(outputs) > 1:
        middle = len(outputs) // 2
        return [Outputs(outputs[:middle]), Outputs(outputs[middle:])]
    return [
        Outputs(
            [
                CoreOutput(
                    request_id=outputs[0].request_id,
                    ids=[],
                    finish_reason="error",
                    error="the log-probabilities of this request are too large to be sent: ask for"
                    " fewer prompt_logprobs or shorten the prompt",
                    error_code="invalid_request",
                )
            ]
        )
    ]


logger = logging.getLogger("vllmx.core")


def next_client(listener: socket.socket) -> socket.socket:
    """Waits for a client at a listening socket, or for one that `PassedConnections` passes on.
    Raises OSError when there will be none."""
    if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return listener.accept()[0]
    data, descriptors, _, _ = socket.recv_fds(listener, 1, 1)
    if not data:
        raise ConnectionResetError
    if not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    connection = socket.socket(fileno=descriptors[0])
    connection.set_inheritable(False)
    return connection


class ClientListener:
    """Lets clients in, each on a thread that receives for it.

    Args:
        inbox: where the core's loop takes clients that come and go, and their messages.
    """

    def __init__(self, listener: socket.socket, inbox: Inbox) -> None:
        self._listener = listener
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._sockets: set[CoreSocket] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def open(self, info: CoreInfo) -> None:
        """Accepts clients from now on, on a thread of its own."""
        thread = threading.Thread(
            target=self._accept, args=(info,), name="vllmx-accept", daemon=True
        )
        thread.start()

    def close(self) -> list[CoreSocket]:
        """Lets no client in any more, and returns the sockets of all that are there. A client that
        came while the process ends would take it for the next core."""
        with self._lock:
            self._is_closed = True
            return list(self._sockets)

    def _accept(self, info: CoreInfo) -> None:
        while True:
            try:
                accepted = next_client(self._listener)
            except OSError:  # the process ends
                return
            if self._is_closed:
                accepted.close()  # it tries again, and finds the next core
                return
            accepted.setblocking(True)
            prefix = prefix_of(next(self._numbers))
            named = msgspec.structs.replace(info, id_prefix=prefix)
            threading.Thread(
                target=self._serve, args=(accepted, named), name="vllmx-client", daemon=True
            ).start()

    def _serve(self, accepted: socket.socket, info: CoreInfo) -> None:
        with accepted:
            peer = CoreSocket(accepted, lambda: None)  # `messages` sees its end
            client = Client(info.id_prefix, peer.send)
            with self._lock:
                if self._is_closed:
                    return
                self._sockets.add(peer)
                peer.send(Ready(info))  # before any last words
            self._inbox.put(Joined(client))
            try:
                for message in peer.messages():
                    if isinstance(message, Ping):
                        peer.send(Pong())
                    else:
                        self._inbox.put(Said(client, message))
            except FrameError as error:
                logger.error("an API process sent %s: its connection is closed", error)
            except OSError:
                pass
            finally:
                self._sockets.discard(peer)
                self._inbox.put(Left(client))
                peer.close()
