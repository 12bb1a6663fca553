"""How an asyncio program reaches an engine core: in its own process, or on a thread of this one.

Both kinds have one face, `Frontend`, and tell their updates to one `Listener`, always on the thread
of the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Literal, Protocol, TypeVar

from vllmx_core.errors import EngineDeadError, StepTimeoutError, VllmxError

from vllmx_engine.core.load_plan import LoadPlan
from vllmx_engine.link.heartbeat import Heartbeat
from vllmx_engine.link.supervisor import CoreProcess
from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.ipc import (
    AbortRequests,
    AddRequest,
    FromCore,
    Outputs,
    Ping,
    Pong,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    Shutdown,
    Start,
    Stats,
    ToCore,
)
from vllmx_engine.wire.known_specs import KnownSpecs
from vllmx_engine.wire.messages import CoreInfo, CoreOutput, CoreRequest, CoreStats, Follower

logger = logging.getLogger("vllmx.supervisor")

T = TypeVar("T")
START_AGAIN = "start the engine again"
Status = Literal["ready", "restarting", "dead", "closed"]


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what a frontend hears from the core."""

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
        """For how long the core has not answered, when that is too long; else 0."""
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


class _Core:
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


class ThreadFrontend(_Core):
    """The core on a thread of this process. It is not restarted when it dies."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[ToCore] = SimpleQueue()
        self._ready: asyncio.Future[CoreInfo] = self._loop.create_future()
        self._left = asyncio.Event()
        self._thread: Thread

    @classmethod
    async def start(cls, plan: LoadPlan) -> ThreadFrontend:
        """Loads the model. Raises the VllmxError that this met."""
        frontend = cls()
        frontend._thread = Thread(
            target=frontend._run, args=(plan,), name="vllmx-core", daemon=True
        )
        frontend._thread.start()
        try:
            frontend.info = await asyncio.shield(frontend._ready)
        except asyncio.CancelledError:
            await frontend.close()
            raise
        return frontend

    async def close(self) -> None:
        """See `Frontend.close`."""
        self.status = "closed"
        self._inbox.put(Shutdown())
        await self._left.wait()

    def _send(self, message: ToCore) -> None:
        self._inbox.put(message)

    def _run(self, plan: LoadPlan) -> None:
        """The core's thread. What a core is made of is imported here: a server, whose core has a
        process of its own, is ready sooner without."""
        from vllmx_engine.core.core_loop import CoreLoop
        from vllmx_engine.core.load import load_planned

        try:
            core, info = load_planned(plan)
            self._emit(Ready(info))
            on_stuck = partial(self._on_loop, self._leave_stuck)
            CoreLoop(core, self._inbox, self._emit, on_stuck).run()
        except VllmxError as error:
            self._on_loop(self._die, error)
        except Exception:
            logger.exception("the engine core failed")
            self._on_loop(self._die, EngineDeadError("the engine core failed: see its log above"))
        self._on_loop(self._leave, None)

    def _emit(self, message: FromCore) -> bool:
        self._on_loop(self._take, message)
        return True

    def _on_loop(self, function: Callable[[T], None], argument: T) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the event loop was closed without a shutdown: nobody listens
            self._inbox.put(Shutdown())

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Ready):
            self._ready.set_result(message.info)
        else:
            super()._take(message)

    def _die(self, error: VllmxError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self.status == "ready":
            self._give_up(error.message)
            self._tell_lost(_dead(error, error.message))

    def _leave(self, _: None) -> None:
        """The thread is done."""
        self._left.set()

    def _leave_stuck(self, error: StepTimeoutError) -> None:
        """The thread will never be done; should it be after all, it is told to stop."""
        self._inbox.put(Shutdown())
        self._die(error)
        self._left.set()


class ProcessFrontend(_Core):
    """The core in a process of its own, started again when it dies.

    A core that dies soon after its start, again and again, stays dead: waiting longer and longer
    between the attempts, `MAX_QUICK_FAILURES` of them are made.
    """

    MAX_QUICK_FAILURES = 5
    QUICK_S = 30.0
    """A core that was heard of for longer than this has not failed quickly."""
    FIRST_DELAY_S = 0.1
    LAST_DELAY_S = 10.0

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__()
        self._start = Start(
            config=plan.config,
            path=str(plan.path),
            specs=KnownSpecs.of(plan.registry),
            progress=plan.progress,
            log_level=logging.getLogger("vllmx").getEffectiveLevel(),
        )
        self._core: CoreProcess
        self._born_s = 0.0
        self._quick_failures = 0
        self._last_update_s = 0.0
        self._restarting: asyncio.Task[None] | None = None
        self._heartbeat = Heartbeat(lambda: self._send(Ping()))

    @classmethod
    async def start(cls, plan: LoadPlan) -> ProcessFrontend:
        """Spawns the process and loads the model. Raises the VllmxError that this met."""
        frontend = cls(plan)
        await frontend._spawn()
        frontend._heartbeat.start()
        return frontend

    @property
    def silent_s(self) -> float:
        """See `Frontend.silent_s`. A core that starts is no silent one."""
        return self._heartbeat.silent_s if self.status == "ready" else 0.0

    @property
    def pid(self) -> int:
        """Of the core."""
        return self._core.pid

    def unavailable(self) -> EngineDeadError:
        """See `Frontend.unavailable`."""
        if self.status == "restarting":
            return EngineDeadError(
                f"the engine core is being restarted ({self._last_reason}): try again in a moment"
            )
        return super().unavailable()

    async def close(self) -> None:
        """See `Frontend.close`."""
        if self.status == "closed":
            return
        self.status = "closed"
        self._heartbeat.stop()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        await self._core.stop()

    def _send(self, message: ToCore) -> None:
        self._core.send(message)

    def _take(self, message: FromCore) -> None:
        self._heartbeat.heard()
        if not isinstance(message, Pong):  # which a core whose steps hang sends too
            self._last_update_s = self._loop_s()
            super()._take(message)

    async def _spawn(self) -> None:
        core = await CoreProcess.start(self._start, self._take, self._on_lost)
        if core.lost:  # as soon as it was ready
            await core.stop(0.0)
            raise core.failure or EngineDeadError(core.describe_end())
        self._core, self.info = core, core.info
        self._born_s = self._last_update_s = self._loop_s()

    def _on_lost(self, core: CoreProcess) -> None:
        if core is not getattr(self, "_core", None):
            return  # `_spawn` has not taken it yet, and sees it for itself
        self.status = "restarting"
        self._last_reason = "it failed"
        if core.failure is not None:
            self._lose(core.failure)
        self._restarting = asyncio.ensure_future(self._restart(core))

    def _lose(self, failure: VllmxError) -> None:
        """Requests in flight end at once: they do not wait until a process that hangs is gone."""
        self._last_reason = failure.message
        logger.error("%s; every request in flight is lost", failure.message)
        text = f"{failure.message}; the engine core is being restarted: send the request again"
        self._tell_lost(_dead(failure, text))

    async def _restart(self, core: CoreProcess) -> None:
        if self._last_update_s - self._born_s > self.QUICK_S:
            self._quick_failures = 0
        ended = await core.reap(timeout_s=1.0)
        if core.failure is None:
            self._lose(EngineDeadError(core.describe_end()))
        if not ended:
            self._give_up(f"{self._last_reason}; process {core.pid} cannot be killed")
            return
        reason = self._last_reason
        while self._quick_failures < self.MAX_QUICK_FAILURES:
            self._quick_failures += 1
            await asyncio.sleep(self._delay_s())
            try:
                await self._spawn()
            except Exception as error:  # if this task died, nobody would ever try again
                self._last_reason = reason = str(error)
                logger.error("the engine core cannot be restarted: %s", reason, exc_info=error)
                continue
            self.status = "ready"
            self._heartbeat.heard()
            if self.listener is not None:
                self.listener.restarted(self.info)
            return
        logger.critical("the engine core keeps failing: it is not restarted again")
        self._give_up(reason)

    def _loop_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _delay_s(self) -> float:
        delay = self.FIRST_DELAY_S * 2.0 ** (self._quick_failures - 1)
        return min(delay, self.LAST_DELAY_S)


def _dead(error: VllmxError, text: str) -> EngineDeadError:
    """What requests in flight are told; a hanging device keeps its own type."""
    kind = type(error) if isinstance(error, EngineDeadError) else EngineDeadError
    return kind(text)
