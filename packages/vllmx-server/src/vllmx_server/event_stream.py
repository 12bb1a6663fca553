"""Server-sent events over plain ASGI.

starlette's StreamingResponse starts a task group and a memory stream for each response; at hundreds
of streams that costs as much as the events themselves. Here one task a stream watches for the
client's disconnect, and the stream's own task writes ready-made bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


class EventStream:
    """An ASGI response that sends each item of `events` (bytes with their SSE framing) at once.

    When the client goes away, `events` is closed, which aborts the generation behind it.
    """

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in (writer, watcher):
                task.cancel()
            await asyncio.gather(writer, watcher, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        async with contextlib.AsyncExitStack() as stack:
            close = getattr(self.events, "aclose", None)
            if close is not None:
                stack.push_async_callback(close)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
