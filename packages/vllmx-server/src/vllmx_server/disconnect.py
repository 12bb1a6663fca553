"""Work that a client waits for, and that ends when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.deadline import NEVER, Deadline

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. What it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    receive: Receive,
    submit: Coroutine[Any, Any, list[RequestStream]],
    deadline: Deadline = NEVER,
) -> list[RequestStream]:
    """The streams that `submit` starts. When the client leaves first it is cancelled, and
    ClientDisconnect is raised then; RequestTimeoutError when the time is up. Whenever they are not
    returned, what it has started is aborted."""
    worker = asyncio.ensure_future(submit)
    watcher = asyncio.ensure_future(disconnected(receive))
    there = False
    try:
        done = await _first_of(worker, watcher, deadline)
        there = bool(done) and not watcher.done()
    finally:
        watcher.cancel()
        if not there:
            worker.add_done_callback(_abort_all)
            worker.cancel()
        try:
            await asyncio.wait((worker, watcher))
        except asyncio.CancelledError:
            worker.add_done_callback(_abort_all)
            raise
    if there:
        return worker.result()
    raise ClientDisconnect if done else deadline.error()


async def _first_of(
    worker: asyncio.Future[Any], watcher: asyncio.Future[None], deadline: Deadline
) -> set[asyncio.Future[Any]]:
    """Which of them is done; none when the time is up."""
    done, _ = await asyncio.wait(
        (worker, watcher), timeout=deadline.left_s, return_when=asyncio.FIRST_COMPLETED
    )
    return done


def _abort_all(worker: asyncio.Future[list[RequestStream]]) -> None:
    """Nobody waits for what it has started."""
    if not worker.cancelled() and worker.exception() is None:
        for stream in worker.result():
            stream.abort()


async def while_there(
    receive: Receive, work: Coroutine[Any, Any, T], deadline: Deadline = NEVER
) -> T:
    """What `work` returns. When the client leaves first it is cancelled, and ClientDisconnect is
    raised; RequestTimeoutError when the time is up."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        done = await _first_of(worker, watcher, deadline)
    finally:
        gone = not worker.done()
        worker.cancel()
        watcher.cancel()
        await asyncio.wait((worker, watcher))
    if gone:
        raise ClientDisconnect if done else deadline.error()
    return worker.result()
