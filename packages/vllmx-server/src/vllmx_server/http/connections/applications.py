"""The applications of one connection's requests, and their queues of messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.config import Config
from vllmx_core.system.private_traceback import private_traceback

logger = logging.getLogger("vllmx.server")

_ROOM = 8
"""Pieces of a body, of at most 64 KiB, that may wait for the application."""


class Client:
    """A client that waits for an answer; ASGI's `receive` is a method of it. To learn from
    `http.disconnect` that the client has left would take a task of its own."""

    is_gone = False
    _when_gone: tuple[Callable[[], object], ...] = ()

    def when_gone(self, call: Callable[[], object]) -> None:
        """Has the event loop call `call` when the client has left or its answer is complete."""
        if self.is_gone:
            asyncio.get_running_loop().call_soon(call)
        else:
            self._when_gone = (*self._when_gone, call)

    def forget(self, call: Callable[[], object]) -> None:
        """Undoes `when_gone`, unless the call is already scheduled."""
        self._when_gone = tuple(other for other in self._when_gone if other != call)

    def leave(self) -> None:
        """The client has left."""
        if not self.is_gone:
            self.is_gone = True
            calls, self._when_gone = self._when_gone, ()
            for call in calls:
                asyncio.get_running_loop().call_soon(call)


class Inbox(Client):
    """The messages for one application. It never holds up its connection for an application that
    has ended.

    Args:
        on_read: called with the bytes of the body that the application reads; whoever puts messages
            then bounds them. None: `put` waits while `_ROOM` pieces are unread.
    """

    def __init__(self, on_read: Callable[[int], Awaitable[None]] | None = None) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._on_read = on_read
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended = False

    async def receive(self) -> Any:
        """The next message; the application calls it."""
        message = await self._messages.get()
        if self._on_read is not None:
            await self._on_read(len(message.get("body", b"")))
        elif self._messages.qsize() < _ROOM:
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
        is_full = self._on_read is None and self._messages.qsize() >= _ROOM
        if message.get("more_body") and is_full:
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
        self.spawn(run_app, app, scope, inbox, send)
        return inbox.put


async def run_app(
    app: Any, scope: Any, inbox: Inbox, send: Callable[[Any], Awaitable[None]]
) -> None:
    try:
        await app(scope, inbox.receive, send)
    except Exception as error:
        logger.error("unhandled error in the application\n%s", private_traceback(error))
    finally:
        inbox.end()
        await send(None)
