"""Work that a client waits for, and that ends when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.http.connections.applications import Client
from vllmx_server.http.deadline import NEVER, Deadline

T = TypeVar("T")


class Interruption:
    """Cancels a block of the current task when the client leaves or the time is up, and raises
    ClientDisconnect or RequestTimeoutError at its end.

    With our own server, whose `receive` belongs to a `Client`, that takes no task. Otherwise a task
    awaits `receive`, and drops what the client still sends.
    """

    def __init__(self, receive: Receive, deadline: Deadline = NEVER) -> None:
        client = getattr(receive, "__self__", None)
        self._client = client if isinstance(client, Client) else None
        self._receive = receive
        self._deadline = deadline
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._is_open = False
        self._task: asyncio.Task[Any]
        self._cancelling = 0

    def client_left(self) -> None:
        """Interrupts the block."""
        self._interrupt(ClientDisconnect)

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be interrupted"
        self._task, self._cancelling, self._is_open = task, task.cancelling(), True
        if self._client is not None:
            self._client.when_gone(self.client_left)
        else:
            self._watcher = asyncio.ensure_future(_disconnected(self._receive))
            self._watcher.add_done_callback(lambda _: self.client_left())
        left_s = self._deadline.left_s
        if left_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left_s, self._interrupt, self._deadline.error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        if self._client is not None:
            self._client.forget(self.client_left)
        for pending in (self._watcher, self._timer):
            if pending is not None:
                pending.cancel()
        if self._error is None or self._task.uncancel() > self._cancelling:
            return  # not interrupted, or cancelled by others as well
        if kind is None or kind is asyncio.CancelledError:
            raise self._error from None

    def _interrupt(self, make: Callable[[], Exception]) -> None:
        if self._is_open and self._error is None:
            self._error = make()
            self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(
    receive: Receive, work: Coroutine[Any, Any, T], deadline: Deadline = NEVER
) -> T:
    """Returns the result of `work`. When the client leaves or the time is up, cancels it and raises
    ClientDisconnect or RequestTimeoutError."""
    with Interruption(receive, deadline):
        return await work


async def unless_gone(
    receive: Receive,
    submit: Coroutine[Any, Any, list[RequestStream]],
    deadline: Deadline = NEVER,
) -> list[RequestStream]:
    """The streams that `submit` starts, as `while_there`; they are aborted on an error."""
    streams: list[RequestStream] = []
    try:
        with Interruption(receive, deadline):
            streams = await submit
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams
