"""Serves an ASGI application on a listening socket until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial
from typing import Any

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from vllmx_server.http.connections.connection import Connection, Shared
from vllmx_server.http.connections.listening import ConnectionLimits, Listener, Place, refusal
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
    """Accepts connections until `stop` is set; then they have `config.graceful_timeout` to end. The
    socket stays open: whoever made it closes it. `tls`: None: as the configuration says."""
    tls = tls or config.create_ssl_context()
    server = _Server(app, config, listening, limits, timeouts, tls)
    try:
        await stop.wait()
    finally:
        await server.close(config.graceful_timeout)


class _Server:
    def __init__(
        self,
        app: Any,
        config: Config,
        listening: socket.socket,
        limits: ConnectionLimits,
        timeouts: Timeouts,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = WorkerContext(None)
        self._shared = Shared(app, config, self._context, tls, timeouts)
        answer = b"" if config.ssl_enabled else refusal()
        self._listener = Listener(listening, limits, self._begin, refusal=answer)
        self._listener.start()

    def _begin(self, accepted: socket.socket, place: Place) -> None:
        connection = Connection(self._shared, partial(self._listener.set_idle, place))
        task = asyncio.ensure_future(connection.run(accepted))
        place.close = task.cancel
        self._tasks.add(task)

        def on_end(task: asyncio.Task[None]) -> None:
            if not connection.began:
                accepted.close()
            self._tasks.discard(task)
            self._listener.release(place)

        task.add_done_callback(on_end)

    async def close(self, timeout_s: float) -> None:
        """Ends what waits for a request at once, and everything else after `timeout_s`."""
        self._listener.stop()
        await self._context.terminated.set()
        for place in self._listener.idle:
            place.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
