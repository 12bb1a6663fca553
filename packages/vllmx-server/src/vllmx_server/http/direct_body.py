"""Chunks of an HTTP/1.1 body straight to hypercorn's transport.

On its way through hypercorn and h11 an event costs four coroutines, a lock and five objects, as
much as everything that we do for it, to arrive at the same bytes: neither keeps any state of a
chunk. So a chunk is framed here while the connection is idle. A client that is slow or gone, HTTP/2
any other server, and releases of hypercorn
that were not tested take the usual way.
"""

from __future__ import annotations

from asyncio import WriteTransport
from typing import Self

from starlette.types import Send

from vllmx_server.http.connections.versions import untested


class DirectBody:
    """The body of one response whose start has been sent, without a content-length.

    Attributes:
        num_written: chunks so far.
    """

    def __init__(self, transport: WriteTransport) -> None:
        self._transport = transport
        self.num_written = 0

    @classmethod
    def of(cls, send: Send) -> Self | None:
        """`send` as the server gave it to the application; None: it must be used."""
        if untested() is not None:
            return None
        from hypercorn.protocol.h11 import H11Protocol
        from hypercorn.protocol.http_stream import HTTPStream

        from vllmx_server.http.connections.connection import Connection

        stream = getattr(send, "__self__", None)
        if not isinstance(stream, HTTPStream) or stream.scope["http_version"] != "1.1":
            return None
        protocol = getattr(stream.send, "__self__", None)
        if not isinstance(protocol, H11Protocol):
            return None
        server = getattr(protocol.send, "__self__", None)
        return cls(server.writer.transport) if isinstance(server, Connection) else None

    def is_free(self) -> bool:
        """A chunk may be written; else send it, since that waits for the client."""
        transport = self._transport
        return not (transport.get_write_buffer_size() or transport.is_closing())

    def write(self, data: bytes) -> None:
        """Writes a chunk; only where `is_free`."""
        self.num_written += 1
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
