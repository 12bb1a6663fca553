"""The door of a core's process: where further clients come in once the model is loaded."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from queue import SimpleQueue

import msgspec

from vllmx_engine.core.clients import Client, Joined, Left, Said, prefix_of
from vllmx_engine.link.core_socket import CoreSocket
from vllmx_engine.wire.ipc import FrameError, Ping, Pong, Ready, ToCore
from vllmx_engine.wire.messages import CoreInfo

logger = logging.getLogger("vllmx.core")


class CoreDoor:
    """Lets clients in, each on a thread that receives for it.

    Args:
        inbox: where the core's loop takes clients that come and go, and their messages.
    """

    def __init__(
        self, listener: socket.socket, inbox: SimpleQueue[ToCore | Joined | Left | Said]
    ) -> None:
        self._listener = listener
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._sockets: set[CoreSocket] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def open(self, info: CoreInfo) -> None:
        """Accepts clients from now on, on a thread of its own."""
        thread = threading.Thread(target=self._accept, args=(info,), name="vllmx-door", daemon=True)
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
                accepted, _ = self._listener.accept()
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
