"""The door at which other processes of this user reach a core: a socket that outlives the core's
lives."""

from __future__ import annotations

import shutil
import socket

from vllmx_engine.link.supervisor import listen, socket_folder

_BACKLOG = 64


class Door:
    """A listening socket with mode 0600, in a folder that nobody else can enter.

    Whoever connects while the core starts waits there until it serves.

    Attributes:
        path: of the socket, for `AttachedFrontend`.
        listener: for the core's process.
    """

    def __init__(self) -> None:
        self._folder = socket_folder()
        self.path = self._folder / "door.sock"
        self.listener: socket.socket = listen(self.path, _BACKLOG)
        self.listener.setblocking(True)  # a thread of the core accepts

    def close(self) -> None:
        """Nobody comes in any more. May be called twice."""
        self.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
