"""The process that owns the socket, the core and the workers, and answers no requests itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence

from vllmx_core.config import EngineConfig
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_engine.core.found_model import find_model
from vllmx_engine.link.frontend import IN_FLIGHT, Listener, cause_of
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.supervisor import CoreListener
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.replicas.start import Cores, start_frontend
from vllmx_engine.wire.ipc import ErrorRecord
from vllmx_engine.wire.messages import CoreInfo, CoreStats

from vllmx_server.config import ServerConfig
from vllmx_server.host.address import listen, reload_certificate
from vllmx_server.host.models.config import ModelConfig
from vllmx_server.host.models.host import CoreHost
from vllmx_server.host.signals import CLOSE_S, Signals
from vllmx_server.host.workers.channel import Channel
from vllmx_server.host.workers.messages import (
    Begin,
    DrainReplica,
    Relayed,
    RelayedAnswer,
    RelayedMore,
    Reload,
    Sleep,
)
from vllmx_server.host.workers.pool import WorkerPool, asked_of_all
from vllmx_server.limits.keys import ApiKeys, reload_keys
from vllmx_server.limits.rate_limiter import (
    Granted,
    KeyLimiter,
    RateLimiter,
    Reservation,
    Unlimited,
    Used,
)
from vllmx_server.limits.usage import UsageLedger
from vllmx_server.store.database import Storage
from vllmx_server.store.folder import temporary_folder
from vllmx_server.watch.metrics import MetricCounts, Metrics

logger = logging.getLogger("vllmx.supervisor")

_LEAVE_S = 1.0
"""Seconds after which a worker that has not left a model is taken to need it."""


async def serve_with_workers(
    engine: EngineConfig,
    models: Sequence[ModelConfig],
    server: ServerConfig,
    listener: socket.socket,
    signals: Signals,
    on_ready: Callable[[CoreInfo], None],
    operators: socket.socket | None = None,
) -> None:
    """Serves until it is stopped. Raises the errors of `run_server`."""
    found = await asyncio.to_thread(find_model, engine, None)
    folder = None if server.data_dir else str(temporary_folder())
    core_listeners = [CoreListener() for _ in range(engine.replicas)]
    starting = asyncio.ensure_future(start_frontend(found, core_listeners))
    try:
        await asyncio.sleep(0)  # until the core's process is there
        stored = await _open_storage(server, folder)
        try:
            begin = Begin(
                server=server,
                core=ProcessFrontend(found).start_message,
                core_paths=[str(each.path) for each in core_listeners],
                models=list(models),
                row=0,
                num_rows=0,
                seed=0,
                data_dir=str(server.data_dir or folder),
                outlives=folder is None,
            )
            usage = UsageLedger(stored.database)
            supervisor = Supervisor(server, (listener, operators), begin, usage)
            try:
                await supervisor.run(starting, signals, on_ready)
            finally:
                with contextlib.suppress(VllmxError):  # the log has it
                    await usage.keep()
        finally:
            stored.close()
    finally:
        starting.cancel()
        await asyncio.wait((starting,))
        for each in core_listeners:
            each.close()
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


async def _open_storage(server: ServerConfig, folder: str | None) -> Storage:
    """Locks the folder and makes the database that workers open."""
    path = server.data_dir or folder
    stored = Storage(path)
    try:
        await stored.check()
    except BaseException:
        stored.close()
        raise
    return stored


class Supervisor:
    """Watches the core and the workers, and reports the end of either to all workers."""

    def __init__(
        self,
        server: ServerConfig,
        listeners: tuple[socket.socket, socket.socket | None],
        begin: Begin,
        usage: UsageLedger,
    ) -> None:
        self._server = server
        self._host = CoreHost(begin.models[1:], server.idle_unload_s, self._left_by_all)
        self._first_name = begin.models[0].name if begin.models else ""
        self._on_demand = {model.name for model in begin.models if model.on_demand}
        self._core: Cores
        self._is_busy = False
        self._dead = asyncio.Event()
        self._keys = ApiKeys(path=server.api_keys_file)
        self._limiter: RateLimiter = (
            Unlimited() if server.api_keys_file is None else KeyLimiter(self._keys)
        )
        self._usage = usage
        self._counted = Counted()
        self._beside: set[asyncio.Task[None]] = set()
        self._pool = WorkerPool(
            server.api_workers or 1,
            listeners,
            lambda: listen(listeners[0], server),
            begin,
            self._serve_channel,
        )

    async def run(
        self,
        starting: asyncio.Future[Cores],
        signals: Signals,
        on_ready: Callable[[CoreInfo], None],
    ) -> None:
        """Serves until it is stopped, the core is gone for good, or workers keep failing."""
        try:
            self._core = core = await self._started(starting)
            core.listener = Listener(
                outputs=lambda outputs: None,
                stats=self._note,
                lost=self._tell_lost,
                restarted=lambda info: None,
                dead=self._dead.set,
            )
            self._host.first_took(core.info)
            self._host.watch_first(self._first_name, core)
            for card in await self._host.cards():
                if card.name not in self._on_demand:
                    await self._host.load(card.name)
            stop = signals.begin_serving(self)
            on_ready(core.info)
            stopping = asyncio.ensure_future(stop.wait())
            dying = asyncio.ensure_future(self._dead.wait())
            failing = asyncio.ensure_future(self._pool.failed())
            tasks = (stopping, dying, failing)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_dead, failed = dying.done(), failing.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if is_dead:
                raise core.unavailable()
            if failed and not stop.is_set():
                raise failing.result()
        finally:
            await self._pool.stop(2 * CLOSE_S)
            await self._host.close()

    async def _started(self, starting: asyncio.Future[Cores]) -> Cores:
        """Returns the core when all workers serve it. Raises the errors of either."""
        ready = asyncio.ensure_future(self._pool.ready())
        try:
            await asyncio.wait((starting, ready), return_when=asyncio.FIRST_EXCEPTION)
            core = starting.result() if starting.done() else None
            await ready
            return core or await starting
        finally:
            ready.cancel()

    # --- signals ----------------------------------------------------------------------------------
    async def end(self) -> None:
        """See `vllmx_server.host.signals.Serving`."""
        timeout_s = self._server.drain_timeout_s + 2 * CLOSE_S
        await asked_of_all(self._pool.channels(), "end", type(None), timeout_s)

    def reload(self) -> None:
        """See `vllmx_server.host.signals.Serving`."""
        sound = self._server.ssl_certfile is not None and reload_certificate(self._server, None)
        found = Reload(keys=reload_keys(self._keys), certificate=sound)
        for channel in self._pool.channels():
            channel.tell("reload", found)

    # --- what workers ask -------------------------------------------------------------------------
    def _serve_channel(self, channel: Channel) -> None:
        limiter = WorkerLimiter(self._limiter, channel)

        async def settle_all() -> None:
            await channel.gone.wait()
            self._counted.bury(channel)
            await limiter.close()

        async def wake_for_it() -> None:  # a worker that starts again waits for the core
            with contextlib.suppress(VllmxError):
                await self._host.wake_idle()

        for each in (settle_all(), wake_for_it()):
            task = asyncio.ensure_future(each)
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)
        self._counted.serve(channel)
        channel.serve(
            used=self._usage.add,
            usage=self._usage.all,
            load=self._host.load,
            unload=self._host.unload,
            cards=self._host.cards,
            wake_idle=self._host.wake_idle,
            sleep=self._sleep,
            drain_replica=self._drain_replica,
            add_replica=self._add_replica,
            wake=self._wake,
            shut_down=lambda: os.kill(os.getpid(), signal.SIGTERM),
            relay=self._relay,
            relay_more=self._relay_more,
            relay_end=self._relay_end,
        )

    async def _sleep(self, asked: Sleep) -> None:
        if self._is_busy and not asked.force:
            raise InvalidRequestError(IN_FLIGHT)
        await self._core.sleep(asked.level)

    async def _wake(self) -> None:
        await self._core.wake()

    async def _drain_replica(self, asked: DrainReplica) -> None:
        replicas = self._replicas()
        channels = self._pool.channels()
        tasks = [each.ask("drain_replica", asked, type(None)) for each in channels]
        await asyncio.gather(*tasks)
        await replicas.drain(asked.number, 0.0)

    async def _add_replica(self, number: int) -> None:
        await self._replicas().bring_back(number)
        channels = self._pool.channels()
        await asyncio.gather(*(one.ask("add_replica", number, type(None)) for one in channels))

    def _replicas(self) -> ReplicaFrontend:
        if not isinstance(self._core, ReplicaFrontend):
            raise InvalidRequestError("the model has no replicas: start with --replicas")
        return self._core

    async def _relay(self, relayed: Relayed) -> RelayedAnswer:
        return await self._pool.leader.ask("relay", relayed, RelayedAnswer)

    async def _relay_more(self, number: int) -> RelayedMore:
        return await self._pool.leader.ask("relay_more", number, RelayedMore)

    def _relay_end(self, number: int) -> None:
        self._pool.leader.tell("relay_end", number)

    async def _left_by_all(self, name: str) -> bool:
        channels = self._pool.channels()
        if name == self._first_name and not self._pool.is_whole:
            return False  # a worker that is starting needs the core
        left = await asked_of_all(channels, "leave", bool, _LEAVE_S, name)
        return len(left) == len(channels) and all(left)

    def _note(self, stats: CoreStats) -> None:
        self._is_busy = bool(stats.num_running or stats.num_waiting)

    def _tell_lost(self, error: VllmxError) -> None:
        for channel in self._pool.channels():
            channel.tell("core_lost", ErrorRecord.of(cause_of(error)))


COUNT_S = 1.0
"""A worker that does not answer for so long is counted by what it sent last."""
ModelCounts = dict[str, MetricCounts]
"""The counts by model."""


class Counted:
    """The counts of all workers, those that have ended among them.

    A worker sends its counts once a second while they change, and with each question for those of
    the whole server. So whatever was shown once is known here, and no counter falls when a worker
    dies.
    """

    def __init__(self) -> None:
        self._known: dict[Channel, ModelCounts] = {}
        self._gone: dict[str, Metrics] = {}

    def serve(self, channel: Channel) -> None:
        """Takes the counts of a worker, and answers with those of all others."""

        def counted(counts: ModelCounts) -> None:
            self._note(channel, counts)

        async def metrics(own: ModelCounts) -> list[ModelCounts]:
            self._note(channel, own)
            return await self.of_others(channel)

        self._known[channel] = {}
        channel.serve(counted=counted, metrics=metrics)

    def bury(self, channel: Channel) -> None:
        """Keeps the counts of a worker that has ended."""
        for model, counts in self._known.pop(channel, {}).items():
            gone = self._gone.setdefault(model, Metrics.elsewhere(model))
            gone.add(counts)
            gone.show(counts.core)

    async def of_others(self, requester: Channel) -> list[ModelCounts]:
        """The counts of all workers but the one that asks, as new as they can be had."""
        others = [channel for channel in self._known if channel is not requester]
        await asyncio.gather(*map(self._ask, others))
        found = [counts for channel, counts in self._known.items() if channel is not requester]
        return [*found, {model: gone.counts() for model, gone in self._gone.items()}]

    async def _ask(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(COUNT_S):
                self._note(channel, await channel.ask("count", None, ModelCounts))
        except (TimeoutError, VllmxError):
            pass

    def _note(self, channel: Channel, counts: ModelCounts) -> None:
        if not channel.gone.is_set():  # else it is buried, or will be with what it told before
            self._known[channel] = counts


class WorkerLimiter:
    """The rate limiter for one worker. If the worker dies, its reservations are charged in full."""

    def __init__(self, limiter: RateLimiter, channel: Channel) -> None:
        self._limiter = limiter
        self._open: dict[int, int] = {}
        channel.serve(reserve=self._reserve, settle=self._settle)

    async def close(self) -> None:
        """Charges what is still reserved: the worker is gone."""
        while self._open:
            ticket, num_tokens = self._open.popitem()
            await self._limiter.settle(Used(ticket=ticket, num_tokens=num_tokens))

    async def _reserve(self, reservation: Reservation) -> Granted:
        granted = await self._limiter.reserve(reservation)
        self._open[granted.ticket] = reservation.num_tokens
        return granted

    async def _settle(self, used: Used) -> None:
        if self._open.pop(used.ticket, None) is not None:
            await self._limiter.settle(used)
