"""A core for clients on other hosts: `vllmx core`.

This process starts the core and starts it again when it dies. It also accepts the clients, checks
that they have the key, and passes their connections to the core, so that the core never reads from
a stranger and a frame takes no detour.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from vllmx_core.system.greeter import Greeter
from vllmx_core.system.handshake import LET_IN, HandshakeError

from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.frontend import Listener
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.remote_core import CORES, digest_key, model_mark, watch_peer

logger = logging.getLogger("vllmx.supervisor")

_OTHER_MODEL = b"\2"


def _nothing(_: object) -> None:
    """The supervisor of a core needs none of what it sends."""


class PassedConnections:
    """Connections that this process accepts for the core, which wait there until it serves.

    Attributes:
        listener: a socket over which the core receives them.
    """

    def __init__(self) -> None:
        self._sender, self.listener = socket.socketpair()
        self._sender.setblocking(False)

    def add(self, connection: socket.socket) -> None:
        """Passes a connection on; the caller closes its own descriptor. Raises OSError when too
        many wait."""
        socket.send_fds(self._sender, [b"."], [connection.fileno()])

    def close(self) -> None:
        """Drops those that wait."""
        self._sender.close()
        self.listener.close()


async def serve_core(
    found: FoundModel,
    listener: socket.socket,
    key: bytes,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Runs a core until it is gone for good (EngineDeadError) or the task is cancelled. Clients
    that come while it loads wait for it. Raises the VllmxError that loading met.

    Args:
        found: the model.
        listener: listens where clients connect; closed at the end.
        on_ready: called once the model is loaded.
    """
    mark, passed, dead = model_mark(found), PassedConnections(), asyncio.Event()
    config = replace(found.config, model=mark.hex())
    found = replace(found, config=config, digest_key=digest_key(key), host_key=key)

    def let_in(connection: socket.socket, purpose: int, wanted: bytes) -> bool:
        if wanted != mark:
            connection.sendall(_OTHER_MODEL)
            raise HandshakeError("it asks for another model, or for other files of it")
        watch_peer(connection)
        connection.sendall(LET_IN)
        passed.add(connection)
        return False  # the core gets a descriptor of its own

    try:
        Greeter(listener, key, CORES, let_in, logger)
        core = await ProcessFrontend.start(found, passed)
        try:
            core.listener = Listener(
                outputs=_nothing, stats=_nothing, lost=_nothing, restarted=_nothing, dead=dead.set
            )
            on_ready()
            await dead.wait()
            raise core.unavailable()
        finally:
            await core.close()
    finally:
        listener.close()
        passed.close()
