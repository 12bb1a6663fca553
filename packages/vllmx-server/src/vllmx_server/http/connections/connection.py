"""One accepted socket: bytes to its protocol and back, its deadlines, and how it ends.

A connection has a deadline whenever no request is being answered: for the handshake and the headers
of a request that has begun, and a longer one between requests. When its client closes, the
applications are notified at once, and the descriptor is freed as soon as they have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.errors import HeaderTimeoutError
from vllmx_server.http.connections.applications import Applications
from vllmx_server.http.connections.http1 import Http1
from vllmx_server.http.connections.http2 import Http2
from vllmx_server.http.connections.settings import Timeouts, least_taken

logger = logging.getLogger("vllmx.server")

_RECEIVE_BYTES = 1 << 16
_LINGER_S, _LINGER_IDLE_S = 30.0, 5.0
"""Time after the last answer during which what the client still sends is read and dropped: in all,
and between two receipts. The rest of the answer has the same time."""
_LINGER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Shared:
    """The common part of all connections of a server."""

    app: Any
    config: Config
    context: WorkerContext
    tls: ssl.SSLContext | None
    timeouts: Timeouts


class Connection:
    """A connection from its acceptance to its end, in `run`.

    Args:
        on_idle: called with True when it begins to wait for a request, and False when it ceases.
    """

    def __init__(self, shared: Shared, on_idle: Callable[[bool], None]) -> None:
        self.writer: asyncio.StreamWriter
        self.reader: asyncio.StreamReader
        self._shared = shared
        self._on_idle = on_idle
        self._protocol: Http1 | Http2
        self._deadline = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._is_idle, self._awaits_rest = True, True
        self._finished_s: float | None = None
        self.began = False
        """The connection closes the socket."""

    async def run(self, accepted: socket.socket) -> None:
        """Serves until the client has left or the server has closed it. Cancelling it cuts the
        connection."""
        self.began = True
        try:
            await self._open(accepted)
        except (OSError, TimeoutError):  # a handshake that failed
            return
        try:
            await self._serve()
        except* OSError:
            pass
        except* asyncio.CancelledError:
            self.writer.transport.abort()
        except* Exception as group:
            logger.error("a connection failed\n%s", private_traceback(group))
        await self._close()

    async def _open(self, accepted: socket.socket) -> None:
        self.reader = asyncio.StreamReader(_RECEIVE_BYTES)
        protocol = asyncio.StreamReaderProtocol(self.reader)
        tls = self._shared.tls
        times = {
            "ssl_handshake_timeout": self._shared.timeouts.header_s,
            "ssl_shutdown_timeout": _LINGER_IDLE_S,
        }
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=tls, **(times if tls is not None else {})
        )
        self.writer = asyncio.StreamWriter(transport, protocol, self.reader, self._loop)

    async def _serve(self) -> None:
        async with Applications(self._loop) as applications:
            self._applications = applications
            tls = self.writer.get_extra_info("ssl_object")
            agreed = None if tls is None else tls.selected_alpn_protocol()
            self._protocol = self._speak(Http2 if agreed == "h2" else Http1)
            await self._protocol.initiate()
            try:
                async with self._deadline:
                    self._expire_in(self._shared.timeouts.header_s)
                    await self._receive()
            except TimeoutError:
                await self._on_deadline()
            except OSError:
                pass
            await self._protocol.handle(Closed())

    def _speak(self, kind: type[Any]) -> Any:
        family = self.writer.get_extra_info("socket").family
        client, server = (
            parse_socket_addr(family, name) if (name := self.writer.get_extra_info(key)) else None
            for key in ("peername", "sockname")
        )
        protocol = kind(
            self._shared.app,
            self._shared.config,
            self._shared.context,
            self._applications,
            ConnectionState({}),
            self._shared.tls is not None,
            client,
            server,
            self.protocol_send,
        )
        if isinstance(protocol, Http2):
            protocol.send_timeout_s = self._shared.timeouts.send_s
        return protocol

    # --- receiving --------------------------------------------------------------------------------
    async def _receive(self) -> None:
        """Receives until the client closes, or has sent too much after the last answer."""
        dropped = 0
        while data := await self.reader.read(_RECEIVE_BYTES):
            if self._finished_s is None:
                await self._take(data)
            else:
                dropped += len(data)
                self._expire_in(_LINGER_IDLE_S)
                if dropped > _LINGER_BYTES:
                    return

    async def _take(self, data: bytes) -> None:
        try:
            await self._protocol.handle(RawData(data))
        except H2ProtocolAssumedError as error:
            self._protocol = self._speak(Http2)
            await self._protocol.initiate()
            await self._protocol.handle(RawData(error.data))
        if self._finished_s is not None:
            await self._protocol.handle(Closed())  # the client waits for no further answer
        elif self._is_idle:
            self._await_request()

    def _await_request(self) -> None:
        """Shortens the deadline when a request has begun to arrive."""
        awaits_rest = isinstance(self._protocol, Http1) and self._protocol.is_mid_request
        if awaits_rest and not self._awaits_rest:
            self._expire_in(self._shared.timeouts.header_s)
        self._awaits_rest = self._awaits_rest or awaits_rest

    # --- events of the protocol -------------------------------------------------------------------
    async def protocol_send(self, event: Event) -> None:
        """Takes bytes for the client, and whether the connection is idle or ends."""
        if isinstance(event, RawData):
            try:
                await self._write(event.data)
            except (ConnectionError, RuntimeError):
                await self._protocol.handle(Closed())
        elif isinstance(event, Closed):
            self._finish()
        elif isinstance(event, Updated):
            self._set_idle(event.idle)

    async def _write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises ConnectionError if the client is gone or too
        slow."""
        transport, send_s = self.writer.transport, self._shared.timeouts.send_s
        if transport.is_closing():  # asyncio would log each further write
            raise ConnectionResetError
        transport.write(data)
        while left_bytes := transport.get_write_buffer_size():
            try:
                async with asyncio.timeout(send_s):
                    await self.writer.drain()
                return
            except TimeoutError:
                taken = left_bytes - transport.get_write_buffer_size()
                if taken < least_taken(send_s):
                    transport.abort()
                    raise ConnectionAbortedError from None

    def _set_idle(self, idle: bool) -> None:
        if self._finished_s is not None:
            return
        if idle != self._is_idle:
            self._is_idle = idle
            self._on_idle(idle)
        if idle:
            self._awaits_rest = False
            self._expire_in(self._shared.config.keep_alive_timeout)
            self._await_request()
        else:
            self._expire_in(None)

    def _expire_in(self, seconds: float | None) -> None:
        if self._deadline.expired():
            return
        when = None if seconds is None else self._loop.time() + seconds
        if self._finished_s is not None and when is not None:
            when = min(when, self._finished_s + _LINGER_S)
        with contextlib.suppress(RuntimeError):  # the deadline is no longer in use
            self._deadline.reschedule(when)

    async def _on_deadline(self) -> None:
        if self._finished_s is not None or not isinstance(self._protocol, Http1):
            return
        if self._protocol.is_mid_request:
            seconds = self._shared.timeouts.header_s
            await self._protocol.refuse(
                HeaderTimeoutError(
                    f"the request's headers did not arrive within {seconds:g} s: send them faster,"
                    " or raise --header-timeout-s"
                )
            )

    # --- the end ----------------------------------------------------------------------------------
    def _finish(self) -> None:
        """The last answer is written. A client that still sends must be read, or closing would
        destroy what it has not read yet."""
        if self._finished_s is not None:
            return
        self._finished_s = self._loop.time()
        if not self._is_idle:
            self._on_idle(True)  # it may be closed to make room for others
        if isinstance(self._protocol, Http1) and not self._protocol.may_have_unread:
            self.writer.close()
            self._expire_in(_LINGER_S)
            return
        with contextlib.suppress(OSError, RuntimeError):
            if self.writer.can_write_eof():
                self.writer.write_eof()
        self._expire_in(_LINGER_IDLE_S)

    async def _close(self) -> None:
        """Frees the descriptor, after the rest of an answer if the client takes it."""
        transport = self.writer.transport
        since_s = self._finished_s or self._loop.time()
        cut = self._loop.call_at(since_s + _LINGER_S, transport.abort)
        try:
            self.writer.close()
            await self.writer.wait_closed()
        except (OSError, RuntimeError):
            pass
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            cut.cancel()
