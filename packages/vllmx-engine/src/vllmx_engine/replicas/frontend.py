"""Several cores of one model behind one `Frontend`.

Each request goes to the replica that the router chooses, and on to another when that one is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import cast

from vllmx_core.errors import EngineDeadError, InvalidRequestError, VllmxError

from vllmx_engine.link.frontend import ASLEEP, SEND_AGAIN, Frontend, Listener, Sleeper, Status
from vllmx_engine.replicas.digests import split_digests
from vllmx_engine.replicas.dispatch import Dispatch
from vllmx_engine.replicas.scaling import Scaling
from vllmx_engine.replicas.seats import Ask, Changes, ReplicaState, Seat, ask_all, check_roles
from vllmx_engine.replicas.stats import merged_info, merged_stats
from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.ipc import Announced, What
from vllmx_engine.wire.messages import CoreInfo, CoreOutput, CoreRequest, CoreStats

logger = logging.getLogger("vllmx.replicas")

_LOOK_S = 0.25
_DRAIN_LOOK_S = 0.02
_ANY: Collection[What] = ("end_session", "is_paused")
"""Calls that are answered by True where one replica says so; others need all of them."""
_RUNS: Collection[Status] = ("ready", "restarting")


StartChild = Callable[[int, Listener], Awaitable[Frontend]]
"""Starts or reaches the core of a replica by its number."""


class ReplicaFrontend:
    """The way to several cores, see `Frontend`. It keeps what each request has generated, so that a
    lost replica loses none.

    Args:
        key, least_remote: see `Dispatch`.
        address: says where replicas reach the core of another one.
    """

    def __init__(self, key: bytes, least_remote: int, address: Callable[[int], str]) -> None:
        self.info: CoreInfo
        self.status: Status = "restarting"
        self.listener: Listener | None = None
        self.stats = CoreStats()
        self._key = key
        self._seats: dict[int, Seat] = {}
        self._least_remote, self._address = least_remote, address
        self._dispatch: Dispatch
        self._early: list[Callable[[], None]] = []
        """Messages that replicas sent before all had started."""
        self._vocabulary: Vocabulary | None = None
        self._changes = Changes(adapters={})
        self._watching: asyncio.Task[None] | None = None
        self._scaling: Scaling | None = None
        self._changing: asyncio.Future[None] | None = None
        """The replica that is added or drained."""
        self._catching_up: set[asyncio.Task[None]] = set()
        self.at_end: Callable[[], None] = lambda: None
        """Called once the cores have ended."""
        self._last_loss: VllmxError = EngineDeadError("no replica has started")

    @classmethod
    async def start(
        cls,
        key: bytes,
        count: int,
        start_child: StartChild,
        *,
        least_remote: int = 1,
        address: Callable[[int], str] = str,
        least: int | None = None,
    ) -> ReplicaFrontend:
        """Starts all replicas together. Raises the first error of any, and ConfigError for roles
        that do not go together; then none is left.

        Args:
            least: the first ones, which always run; the others start asleep and come and go with
                the load. None: all always run.
        """
        made = cls(key, least_remote, address)
        made._scaling = None if least is None else Scaling(least)
        starting = [
            asyncio.ensure_future(start_child(number, made._listener(number)))
            for number in range(count)
        ]
        try:
            made._open(await asyncio.gather(*starting))
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            for task in starting:
                if not task.cancelled() and task.exception() is None:
                    await task.result().close()
            raise
        return made

    def _open(self, frontends: Sequence[Frontend]) -> None:
        for number, frontend in enumerate(frontends):
            self._seats[number] = Seat(number, frontend, partial(self._address, number))
            self._seats[number].is_spare = frontend.status == "asleep"
        check_roles(list(self._seats.values()))
        self._dispatch = Dispatch(
            self._seats, self._key, self._least_remote, self.unavailable, self._emit
        )
        for take in self._early:
            take()
        self._refresh()
        self._watching = asyncio.ensure_future(self._watch())

    def _listener(self, number: int) -> Listener:
        return Listener(
            outputs=partial(self._take, number),
            stats=partial(self._take_stats, number),
            lost=partial(self._take_loss, number),
            restarted=partial(self._take_restart, number),
            dead=self._refresh,
            announced=partial(self._take_announced, number),
        )

    # --- Frontend ---------------------------------------------------------------------------------
    @property
    def silent_s(self) -> float:
        """See `Frontend.silent_s`: one that answers is enough."""
        ready = [seat for seat in self._seats.values() if seat.frontend.status == "ready"]
        return min((seat.frontend.silent_s for seat in ready), default=0.0)

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """See `Frontend.add`."""
        self._dispatch.add(requests)

    def tell(self, vocabulary: Vocabulary) -> None:
        """See `Frontend.tell`."""
        self._vocabulary = vocabulary
        for seat in self._ready():
            seat.frontend.tell(vocabulary)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Frontend.abort`."""
        self._dispatch.abort(request_ids)

    async def call(self, what: What, text: str = "", client: str = "") -> bool:
        """See `Frontend.call`: all replicas are asked."""
        answers = await self._ask_all(lambda one: one.call(what, text, client))
        if self._changes.note(what, text):
            self._repeat(answers)
        return any(answers.values()) if what in _ANY else all(answers.values())

    async def change_adapters(self, name: str, path: str | None) -> None:
        """See `Frontend.change_adapters`: all replicas load it."""
        answers = await self._ask_all(lambda one: one.change_adapters(name, path))
        self._changes.note_adapter(name, path)
        self._repeat(answers)

    def unavailable(self) -> EngineDeadError:
        """See `Frontend.unavailable`."""
        if self.status == "asleep":
            return EngineDeadError(ASLEEP)
        by_status = {seat.frontend.status: seat for seat in self._seats.values()}
        if "ready" in by_status:
            return EngineDeadError("all replicas are busy starting or draining: try again later")
        seat = by_status.get("restarting") or next(iter(by_status.values()))
        return seat.frontend.unavailable()

    async def close(self) -> None:
        """See `Frontend.close`."""
        self.status = "closed"
        for task in (*self._catching_up, self._watching, self._changing):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(seat.frontend.close() for seat in self._seats.values()))
        self.at_end()

    async def sleep(self, level: int = 2) -> None:
        """Ends all cores until `wake`. Raises as `ProcessFrontend.sleep`."""
        running = [one for one in self._sleepers() if one.status in _RUNS]
        # One of them holds the files, which all share.
        await asyncio.gather(*(one.sleep(level if one is running[0] else 2) for one in running))
        self._refresh()

    async def wake(self) -> None:
        """Starts all cores again that are not spare. Raises what one of them met."""
        sleepers = zip(self._seats.values(), self._sleepers(), strict=True)
        await asyncio.gather(*(one.wake() for seat, one in sleepers if not seat.is_spare))
        self._refresh()

    def replicas(self) -> list[ReplicaState]:
        """All replicas and what they do."""
        return [seat.state() for seat in self._seats.values()]

    async def drain(self, number: int, timeout_s: float) -> None:
        """Sends a replica nothing more, and ends its core if this process has started it. Requests
        that have not ended after `timeout_s` go on elsewhere. Raises InvalidRequestError for the
        last replica that serves."""
        seat = self._seat(number)
        if not any(other.serves for other in self._seats.values() if other is not seat):
            raise InvalidRequestError(
                f"replica {number} is the last one that serves: stop the server instead"
            )
        seat.is_draining = True
        until_s = time.monotonic() + timeout_s
        while seat.flights and time.monotonic() < until_s:
            await asyncio.sleep(_DRAIN_LOOK_S)
        core_ids = list(seat.flights)
        self._dispatch.leave(seat, f"replica {number} was drained", is_lost=False)
        seat.frontend.abort(core_ids)
        if hasattr(seat.frontend, "sleep") and seat.frontend.status in _RUNS:
            await cast("Sleeper", seat.frontend).sleep()

    async def bring_back(self, number: int) -> None:
        """Starts a replica again that was drained. Raises what its core meets."""
        seat = self._seat(number)
        if hasattr(seat.frontend, "wake"):
            await cast("Sleeper", seat.frontend).wake()
        if seat.frontend.status == "ready":
            seat.is_draining = seat.is_spare = False

    @property
    def is_asleep(self) -> bool:
        """All cores were ended by `sleep`."""
        return self.status == "asleep"

    def note(self, cause: VllmxError) -> None:
        """See `AttachedFrontend.note`: what ended all cores."""
        for seat in self._seats.values():
            note = getattr(seat.frontend, "note", None)
            if note is not None:
                note(cause)
        self._refresh()

    # --- what replicas say ------------------------------------------------------------------------
    def _take(self, number: int, outputs: list[CoreOutput]) -> None:
        self._emit(self._dispatch.take(self._seats[number], outputs))

    def _emit(self, outputs: list[CoreOutput]) -> None:
        if outputs and self.listener is not None:
            self.listener.outputs(outputs)

    def _take_stats(self, number: int, stats: CoreStats) -> None:
        seat = self._seats.get(number)
        if seat is None:
            self._early.append(partial(self._take_stats, number, stats))
            return
        seat.stats = stats
        self._tell_stats()

    def _take_announced(self, number: int, announced: Announced) -> None:
        if number not in self._seats:
            self._early.append(partial(self._take_announced, number, announced))
            return
        if number not in self._dispatch.router.replicas:
            self._dispatch.router.add(number)
        self._dispatch.router.filed(number, split_digests(announced.filed))
        self._dispatch.router.evicted(number, split_digests(announced.evicted))
        self._dispatch.router.load(number, announced.load, time.monotonic())

    def _take_loss(self, number: int, error: VllmxError) -> None:
        seat = self._seats.get(number)
        if seat is None:
            return
        self._last_loss, seat.stats = error, CoreStats()
        self._dispatch.router.remove(number)
        self._dispatch.leave(seat, error.message.removesuffix(SEND_AGAIN), is_lost=True)
        self._refresh()
        if self.status != "ready" and self.listener is not None:
            self.listener.lost(error)
        self._tell_stats()

    def _take_restart(self, number: int, info: CoreInfo) -> None:
        seat = self._seats.get(number)
        if seat is None:  # others are starting
            return
        if number not in self._dispatch.router.replicas:
            self._dispatch.router.add(number)
        if self._vocabulary is not None:
            seat.frontend.tell(self._vocabulary)
        seat.is_draining = False
        self._make_current(seat)

    def _repeat(self, answers: dict[int, bool]) -> None:
        """Has replicas that started while the others made a change make it too."""
        for seat in self._ready():
            if seat.is_current and seat.number not in answers:
                self._make_current(seat)

    def _make_current(self, seat: Seat) -> None:
        seat.is_current = False
        task = asyncio.ensure_future(self._catch_up(seat))
        self._catching_up.add(task)
        task.add_done_callback(self._catching_up.discard)

    async def _catch_up(self, seat: Seat) -> None:
        number = -1
        try:
            while number != self._changes.number:
                number = self._changes.number
                await self._changes.apply(seat.frontend)
        except VllmxError as error:
            logger.error("replica %d is left out: %s", seat.number, error.message)
            return
        seat.is_current = True
        self._refresh()
        if self.listener is not None:
            self.listener.restarted(self.info)

    async def _watch(self) -> None:
        """Requests of a replica that does not answer go on elsewhere, if there is one. Replicas are
        added and drained."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._scale(time.monotonic())
            for seat in self._seats.values():
                is_silent = seat.frontend.status == "ready" and seat.frontend.silent_s > 0
                others = any(other.serves for other in self._seats.values() if other is not seat)
                if is_silent and others and seat.flights:
                    core_ids = list(seat.flights)
                    text = f"replica {seat.number} does not answer"
                    logger.error("%s", text)
                    self._dispatch.leave(seat, text, is_lost=False)
                    seat.frontend.abort(core_ids)

    def _scale(self, now_s: float) -> None:
        is_changing = self._changing is not None and not self._changing.done()
        if self._scaling is None or is_changing:
            return
        wait_s = self._dispatch.wait_s(now_s)
        if wait_s is None:
            return
        seats = list(self._seats.values())
        change = self._scaling.change(seats, wait_s, now_s, self.bring_back, self.drain)
        self._changing = None if change is None else asyncio.ensure_future(change)

    # --- inside -----------------------------------------------------------------------------------
    def _ready(self) -> Iterator[Seat]:
        return (seat for seat in self._seats.values() if seat.frontend.status == "ready")

    def _seat(self, number: int) -> Seat:
        if number not in self._seats:
            raise InvalidRequestError(
                f"there is no replica {number}: choose one from 0 to {len(self._seats) - 1}",
                param="replica",
            )
        return self._seats[number]

    def _sleepers(self) -> list[Sleeper]:
        found = [seat.frontend for seat in self._seats.values()]
        if not all(hasattr(one, "sleep") for one in found):
            raise InvalidRequestError("these cores cannot sleep: another process has started them")
        return cast("list[Sleeper]", found)

    async def _ask_all(self, ask: Ask) -> dict[int, bool]:
        """See `ask_all`: all replicas that run."""
        seats = list(self._ready())
        if not seats:
            raise self.unavailable()
        return await ask_all(seats, ask)

    def _refresh(self) -> None:
        """Finds the state of all together."""
        if self.status == "closed":
            return
        seats = self._seats.values()
        statuses = {seat.frontend.status for seat in seats}
        order: tuple[Status, ...] = ("ready", "restarting", "asleep", "dead", "closed")
        was_dead = self.status == "dead"
        self.status = next(status for status in order if status in statuses)
        if self.status == "asleep":
            self._changes.is_paused = False  # cores wake unpaused
        self.info = merged_info([seat.frontend.info for seat in seats])
        if self.status == "dead" and not was_dead and self.listener is not None:
            self.listener.dead()

    def _tell_stats(self) -> None:
        named = {str(seat.number): seat.stats for seat in self._seats.values()}
        self.stats = merged_stats(named)
        if self.listener is not None:
            self.listener.stats(self.stats)
