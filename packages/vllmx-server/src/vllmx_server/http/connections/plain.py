"""Serves by hypercorn's public interface alone, for releases whose inside nobody has tested.

What `serving` adds is off then: the limits of connections, the time for headers, what HTTP/2 is
guarded by, and events that go straight to the transport.
"""

from __future__ import annotations

import asyncio
import copy
import socket
import ssl
from typing import Any

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from vllmx_server.http.connections.listening import ConnectionLimits
from vllmx_server.http.connections.timeouts import Timeouts


async def serve(
    app: Any,
    config: Config,
    listening: socket.socket,
    limits: ConnectionLimits,
    timeouts: Timeouts,
    stop: asyncio.Event,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Does what `serving.serve` does, without `limits` and `timeouts`. `tls` is what
    `config.create_ssl_context` gives, or None."""
    own = copy.copy(config)
    own.bind = [f"fd://{listening.dup().detach()}"]  # hypercorn closes its own
    await hypercorn_serve(app, own, shutdown_trigger=stop.wait)
