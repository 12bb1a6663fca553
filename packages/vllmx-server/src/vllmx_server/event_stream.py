"""Responses that hold an engine request: they end it when the client goes away.

starlette's StreamingResponse starts a task group and a memory stream for each response; at hundreds
of streams that costs as much as the events themselves. Here one task a response watches for the
client's disconnect, and the response's own task writes ready-made bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.types import Receive, Scope, Send
from vllmx_core.errors import VllmxError

from vllmx_server.errors import error_body, internal_error

logger = logging.getLogger("vllmx.server")
DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class HeldResponse:
    """An ASGI response whose body is made while the client waits.

    `release` is called exactly once, however it ends. A disconnect cancels the work, which aborts
    the generation behind it.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    async def respond(self, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        worker = asyncio.ensure_future(self.respond(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = worker.done()
            for task in (worker, watcher):
                task.cancel()
            await asyncio.gather(worker, watcher, return_exceptions=True)
            self._release()
        if finished:
            worker.result()


class JSONAnswer(HeldResponse):
    """One JSON body, awaited; its errors become error responses with their status."""

    def __init__(self, body: Awaitable[bytes], release: Callable[[], None]) -> None:
        super().__init__(release)
        self._body = body

    async def respond(self, send: Send) -> None:
        body = await self._body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class EventStream(HeldResponse):
    """Server-sent events: each item of `events` (bytes with their framing) goes out at once.

    The status is sent before the first event, so an error becomes an event of its own.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], release: Callable[[], None]) -> None:
        super().__init__(release)
        self._events = events

    async def respond(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except VllmxError as error:
            await send(_error_event(error))
        except Exception:
            logger.exception("unhandled error in an event stream")
            await send(_error_event(internal_error()))
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _error_event(error: VllmxError) -> dict[str, object]:
    body = b"data: " + error_body(error) + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
