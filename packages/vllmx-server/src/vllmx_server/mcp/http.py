"""An MCP server that is reached over streamable HTTP: the package's transport, with bounds."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from vllmx_server.mcp.lines import MAX_MESSAGE_BYTES, Pace
from vllmx_server.mcp.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2
    from mcp.client._transport import TransportStreams

_CONNECT_S = 10.0


@asynccontextmanager
async def http_transport(settings: ServerSettings) -> AsyncIterator[TransportStreams]:
    """The transport of one connection, for `mcp.Client`."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    assert settings.url is not None
    wait_s = max(settings.call_timeout_seconds, settings.start_timeout_seconds)
    client = httpx2.AsyncClient(
        headers={**settings.headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_S, read=wait_s + _CONNECT_S),
        event_hooks={"response": [_bound]},
    )
    async with (
        client,
        streamable_http_client(
            settings.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
        ) as streams,
    ):
        yield streams


async def _bound(response: httpx2.Response) -> None:
    """Ends an answer that is too long to be one message. Events are bounded one by one, and those
    that answer a GET go on for as long as the connection does."""
    import httpx2

    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.DecodingError("it compresses what was asked for as it is")
    kind = response.headers.get("content-type", "").lower()
    has_events = kind.startswith("text/event-stream") and not response.is_redirect
    response.stream = _bounded(response.stream, None if has_events else MAX_MESSAGE_BYTES)


def _bounded(stream: Any, max_bytes: int | None) -> httpx2.AsyncByteStream:
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes, pace = 0, Pace()
            async for data in stream:
                num_bytes += len(data)
                if max_bytes is not None and num_bytes > max_bytes:
                    raise httpx2.StreamError(f"it is longer than {max_bytes} bytes")
                yield data
                await asyncio.sleep(pace.wait_s(data.count(b"\n\n"), len(data), 0))

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()
