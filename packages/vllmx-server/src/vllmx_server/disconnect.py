"""Work that a client waits for, and that ends when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive
from vllmx_engine.client.request_stream import RequestStream


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. What it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    receive: Receive, submit: Coroutine[Any, Any, list[RequestStream]]
) -> list[RequestStream]:
    """The streams that `submit` starts. When the client leaves first it is cancelled, and what it
    has started is aborted; ClientDisconnect is raised then."""
    worker = asyncio.ensure_future(submit)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone = watcher.done()
        watcher.cancel()
        if not worker.done():
            worker.cancel()
        await asyncio.wait((worker, watcher))
    if not gone:
        return worker.result()
    if not worker.cancelled() and worker.exception() is None:
        for stream in worker.result():
            stream.abort()
    raise ClientDisconnect
