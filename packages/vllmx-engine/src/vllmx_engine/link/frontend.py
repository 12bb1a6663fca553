"""A frontend: the API process's connection to the engine core, and its heartbeat."""

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
    Announced,
    Call,
    Called,
    FromCore,
    LoadAdapter,
    Outputs,
    Stats,
    ToCore,
    UnloadAdapter,
    What,
)
from vllmx_engine.wire.messages import CoreInfo, CoreOutput, CoreRequest, CoreStats, Follower

INTERVAL_S = 0.75
_MISSED = 4
"""Intervals without an answer until the core counts as silent."""
_HANGS = 6
"""Intervals without an answer until a core that others wait for counts as hung."""


class Heartbeat:
    """Asks every `INTERVAL_S`. Intervals are counted instead of seconds, so that pauses of this
    process do not count against the core.

    Args:
        ask: sends a question to the core.
        on_hang: called once the core has been silent for too long.
    """

    def __init__(self, ask: Callable[[], None], on_hang: Callable[[], None] = lambda: None) -> None:
        self._ask, self._on_hang = ask, on_hang
        self._num_missed = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def silent_s(self) -> float:
        """The seconds for which the core has not answered, when that is too long; else 0."""
        return self._num_missed * INTERVAL_S if self._num_missed >= _MISSED else 0.0

    def heard(self) -> None:
        """Something came from the core."""
        self._num_missed = 0

    def start(self) -> None:
        """Needs a running event loop; does nothing the second time."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Stops, whether or not it was started."""
        if self._task is not None:
            self._task.cancel()

    def beat(self) -> None:
        """One question; only the first of those without an answer is sent."""
        if not self._num_missed:
            self._ask()
        self._num_missed += 1
        if self._num_missed == _HANGS:
            self._on_hang()

    async def _run(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(INTERVAL_S)


START_AGAIN = "start the engine again"
ASLEEP = "the model sleeps: wake it (POST /wake), then send the request again"
SEND_AGAIN = "; the engine core is being restarted: send the request again"
IN_FLIGHT = "requests are in flight: have the model sleep when they end, or add mode=abort or wait"

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
    announced: Callable[[Announced], None] = lambda announced: None
    """A replica tells what it has cached."""


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
        """Sends the vocabulary, needed before the first request with a grammar; again after each
        restart of the core. Raises EngineDeadError."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Unknown ids and a core that is gone are ignored."""
        ...

    async def call(self, what: What, text: str = "", client: str = "") -> bool:
        """Has the core do this; False while running requests prevent it. Raises EngineDeadError,
        and what the core raised."""
        ...

    async def change_adapters(self, name: str, path: str | None) -> None:
        """Loads an adapter, or unloads it without a path. Raises what the core met, and
        EngineDeadError."""
        ...

    def unavailable(self) -> EngineDeadError:
        """Why no request is taken now."""
        ...

    async def close(self) -> None:
        """Ends the core. May be called twice."""
        ...


class Sleeper(Protocol):
    """A frontend whose core can sleep."""

    status: Status

    async def sleep(self, level: int = 2) -> None: ...

    async def wake(self) -> None: ...


class CoreFrontend:
    """The part that both kinds share: updates from the core, and calls that it answers."""

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
        followers = [Follower(one.request_id, one.seed, one.generated) for one in others]
        self._send(AddRequest(leader, followers))

    def tell(self, vocabulary: Vocabulary) -> None:
        if self.status != "ready":
            raise self.unavailable()
        self._send(vocabulary)

    def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids and self.status == "ready":
            self._send(AbortRequests(list(request_ids)))

    async def call(self, what: What, text: str = "", client: str = "") -> bool:
        return await self._call(Call(next(self._call_ids), what, text, client))

    async def change_adapters(self, name: str, path: str | None) -> None:
        number = next(self._call_ids)
        if path is None:
            await self._call(UnloadAdapter(number, name))
        else:
            await self._call(LoadAdapter(number, name, path))

    async def _call(self, message: Call | LoadAdapter | UnloadAdapter) -> bool:
        """Sends a message and waits for its answer."""
        if self.status != "ready":
            raise self.unavailable()
        call_id = message.call_id
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await self._calls[call_id]
        finally:
            self._calls.pop(call_id, None)  # the waiting task may have been cancelled

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
            case Announced() if self.listener is not None:
                self.listener.announced(message)
            case Called(call_id, done, error):
                call = self._calls.pop(call_id, None)
                if call is None or call.done():  # cancelled just now
                    return
                if error is None:
                    call.set_result(done)
                else:
                    call.set_exception(error.rebuild())

    def _tell_lost(self, error: VllmxError) -> None:
        """Every request and call in flight is lost."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
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
    """Returns the error that ended the core, from the one that `Listener.lost` received."""
    return type(error)(error.message.removesuffix(SEND_AGAIN))


def lost_with(error: VllmxError, text: str) -> EngineDeadError:
    """The error of requests in flight; that of a hanging device keeps its own type."""
    kind = type(error) if isinstance(error, EngineDeadError) else EngineDeadError
    return kind(text)
