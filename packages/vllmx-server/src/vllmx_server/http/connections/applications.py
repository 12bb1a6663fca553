"""The applications of one connection's requests, and what each has still to receive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.config import Config
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.http.connections.client import Client

logger = logging.getLogger("vllmx.server")

_ROOM = 8
"""Pieces of a body, of 64 KiB at most, that may wait for the application."""


class Inbox(Client):
    """A bounded queue that never holds up its connection for an application that has ended."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended = False

    async def receive(self) -> Any:
        """The next message; the application calls it."""
        message = await self._messages.get()
        if self._messages.qsize() < _ROOM:
            self._has_room.set()
        return message

    async def put(self, message: Any) -> None:
        """Takes a message and returns when there is room for another piece of a body. An end or a
        disconnect never waits."""
        if self._ended:
            return
        if message["type"] == "http.disconnect":
            self.leave()
        self._messages.put_nowait(message)
        if message.get("more_body") and self._messages.qsize() >= _ROOM:
            self._has_room.clear()
            await self._has_room.wait()

    def end(self) -> None:
        """The application has ended: whatever comes is dropped."""
        self._ended = True
        self._has_room.set()


class Applications(TaskGroup):
    """hypercorn's task group, whose queues would block a connection (and over HTTP/2 all of its
    streams) when an application answers before it has read the body."""

    async def spawn_app(
        self,
        app: Any,
        config: Config,
        scope: Any,
        send: Callable[[Any], Awaitable[None]],
    ) -> Callable[[Any], Awaitable[None]]:
        inbox = Inbox()
        self.spawn(_run, app, scope, inbox, send)
        return inbox.put


async def _run(app: Any, scope: Any, inbox: Inbox, send: Callable[[Any], Awaitable[None]]) -> None:
    try:
        await app(scope, inbox.receive, send)
    except Exception as error:
        logger.error("unhandled error in the application\n%s", private_traceback(error))
    finally:
        inbox.end()
        await send(None)
