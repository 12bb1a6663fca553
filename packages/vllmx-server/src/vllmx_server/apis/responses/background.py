"""Responses that go on without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from vllmx_core.errors import VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.apis.responses.store import StoredResponse
from vllmx_server.errors import internal_error
from vllmx_server.http.event_stream import Held
from vllmx_server.store.database import logger

if TYPE_CHECKING:
    from vllmx_server.apis.responses.answer import ResponseAnswer


class Running:
    """One that is being answered, with its events so far."""

    def __init__(
        self, answer: ResponseAnswer, generation: Held, release: Callable[[], None]
    ) -> None:
        self.answer = answer
        self._generation = generation
        self._release = release
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._kept = asyncio.Event()
        self._has_ended = False

    @property
    def has_begun(self) -> bool:
        """It is being answered, which what is kept does not say."""
        return bool(self.answer.stored.response["status"] == "in_progress")

    async def run(self) -> None:
        """Returns at its end, of whatever kind; it is kept then."""
        try:
            async for event in self.answer.events():
                self._tell(event)
        except VllmxError as error:
            self._fail(error)
        except Exception as error:
            logger.error("unhandled error in a response\n%s", private_traceback(error))
            self._fail(internal_error())
        finally:
            self._generation.close()
            await self._keep()
            self._release()
            self._has_ended = True
            self._changed.set()
            self._kept.set()

    async def cancel(self) -> None:
        """Takes it out of the engine, and returns when it is kept as cancelled."""
        self.answer.is_cancelled = True
        self._generation.close()
        await self._kept.wait()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yields the events behind number `after`, as they come."""
        index = 0
        while True:
            while index < len(self._events):
                event, index = self._events[index], index + 1
                if number_of(event) > after:
                    yield event
            if self._has_ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _tell(self, event: bytes) -> None:
        parts = event.split(b"\n\n")
        self._events += [part + b"\n\n" for part in parts if part]
        self._changed.set()

    def _fail(self, error: VllmxError) -> None:
        """It failed before its first event."""
        self._tell(self.answer.begin() + self.answer.fail(error))

    async def _keep(self) -> None:
        try:
            await self.answer.keep(self._events)
        except VllmxError as error:
            logger.error("a response could not be kept: %s", error.message)


def number_of(event: bytes) -> int:
    """The sequence number of an event as it is sent."""
    _, _, rest = event.partition(b'"sequence_number":')
    return int(rest.partition(b",")[0])


class BackgroundResponses:
    """Background responses of this server that have not ended."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, response_id: str) -> Running | None:
        """None where it has ended, or is none of the background."""
        return self._running.get(response_id)

    def begin(self, running: Running) -> None:
        """Goes on with it until its end."""
        name = running.answer.stored.id
        self._running[name] = running
        task = asyncio.ensure_future(running.run())
        self._tasks.add(task)

        def forget(_: object) -> None:
            self._running.pop(name, None)
            self._tasks.discard(task)

        task.add_done_callback(forget)


def lost(stored: StoredResponse) -> None:
    """The server ended while it was being answered."""
    stored.response["status"] = "failed"
    text = "the server ended while this was being answered: send the request again"
    stored.response["error"] = {"code": "server_error", "message": text}
