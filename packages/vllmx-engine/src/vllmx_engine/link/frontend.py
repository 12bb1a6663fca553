"""How an asyncio program reaches an engine core.

The core runs in a process of its own (`process_frontend`) or on a thread of this one
(`thread_frontend`). Both kinds have one face, `Frontend`, and tell their updates to one `Listener`,
always on the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from vllmx_core.errors import EngineDeadError, VllmxError
from vllmx_core.records import Record

from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.ipc import (
    AbortRequests,
    AddRequest,
    FromCore,
    Outputs,
    PrefixCacheReset,
    ResetPrefixCache,
    Stats,
    ToCore,
)
from vllmx_engine.wire.messages import CoreInfo, CoreOutput, CoreRequest, CoreStats, Follower

START_AGAIN = "start the engine again"
ASLEEP = "the model sleeps: wake it (POST /wake), then send the request again"
SEND_AGAIN = "; the engine core is being restarted: send the request again"
Status = Literal["ready", "asleep", "restarting", "dead", "closed"]


class Listener(Record):
    """The functions that a frontend calls with what the core sends."""

    outputs: Callable[[list[CoreOutput]], None]
    stats: Callable[[CoreStats], None]
    lost: Callable[[VllmxError], None]
    """The core is gone, and every request with it."""
    restarted: Callable[[CoreInfo], None]
    dead: Callable[[], None]
    """The core is gone for good: `Frontend.unavailable` says why."""


class Frontend(Protocol):
    """The way to an engine core."""

    info: CoreInfo
    status: Status
    listener: Listener | None

    @property
    def silent_s(self) -> float:
        """The seconds for which the core has not answered, when that is too long; else 0."""
        ...

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """Sends the choices of one call, as `choices_of` makes them. Raises FrameTooLargeError, and
        EngineDeadError unless the status is "ready"."""
        ...

    def tell(self, vocabulary: Vocabulary) -> None:
        """Sends what the core must know before the first request with a grammar. A core that was
        started again must be told again. Raises EngineDeadError."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Unknown ids and a core that is gone are ignored."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """False when running requests hold blocks. Raises EngineDeadError."""
        ...

    def unavailable(self) -> EngineDeadError:
        """Why no request is taken now."""
        ...

    async def close(self) -> None:
        """Ends the core. May be called twice."""
        ...


class CoreFrontend:
    """What both kinds share: updates from the core, and calls that it answers."""

    def __init__(self) -> None:
        self.info: CoreInfo
        self.status: Status = "ready"
        self.listener: Listener | None = None
        self._last_reason = "it was closed"
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._call_ids = itertools.count()

    @property
    def silent_s(self) -> float:
        return 0.0

    def add(self, requests: Sequence[CoreRequest]) -> None:
        if self.status != "ready":
            raise self.unavailable()
        leader, *others = requests
        followers = [Follower(other.request_id, other.seed) for other in others]
        self._send(AddRequest(leader, followers))

    def tell(self, vocabulary: Vocabulary) -> None:
        if self.status != "ready":
            raise self.unavailable()
        self._send(vocabulary)

    def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids and self.status == "ready":
            self._send(AbortRequests(list(request_ids)))

    async def reset_prefix_cache(self) -> bool:
        if self.status != "ready":
            raise self.unavailable()
        call_id = next(self._call_ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(ResetPrefixCache(call_id))
        try:
            return await self._calls[call_id]
        finally:
            self._calls.pop(call_id, None)  # who waited may have been cancelled

    def unavailable(self) -> EngineDeadError:
        if self.status == "asleep":
            return EngineDeadError(ASLEEP)
        return EngineDeadError(f"the engine core is gone ({self._last_reason}): {START_AGAIN}")

    def _send(self, message: ToCore) -> None:
        raise NotImplementedError

    def _take(self, message: FromCore) -> None:
        match message:
            case Outputs(outputs) if self.listener is not None:
                self.listener.outputs(outputs)
            case Stats(stats) if self.listener is not None:
                self.listener.stats(stats)
            case PrefixCacheReset(call_id, done):
                call = self._calls.pop(call_id, None)
                if call is not None:
                    call.set_result(done)

    def _tell_lost(self, error: VllmxError) -> None:
        """Every request and call in flight is lost."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.set_exception(error)
        if self.listener is not None:
            self.listener.lost(error)

    def _give_up(self, reason: str) -> None:
        """Nothing brings the core back."""
        self.status = "dead"
        self._last_reason = reason
        if self.listener is not None:
            self.listener.dead()


def cause_of(error: VllmxError) -> VllmxError:
    """What ended the core, of which `Listener.lost` was told."""
    return type(error)(error.message.removesuffix(SEND_AGAIN))


def lost_with(error: VllmxError, text: str) -> EngineDeadError:
    """The error of requests in flight; that of a hanging device keeps its own type."""
    kind = type(error) if isinstance(error, EngineDeadError) else EngineDeadError
    return kind(text)
