"""The process that owns socket, core and workers, and answers no request itself."""

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
from vllmx_engine.link.frontend import Listener, cause_of
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.supervisor import CoreListener
from vllmx_engine.wire.ipc import ErrorRecord
from vllmx_engine.wire.messages import CoreInfo, CoreStats

from vllmx_server.config import ServerConfig
from vllmx_server.generating.models import ModelInfo
from vllmx_server.host.address import listen, reload_certificate
from vllmx_server.host.models.config import ModelConfig
from vllmx_server.host.models.host import CoreHost
from vllmx_server.host.signals import CLOSE_S, Signals
from vllmx_server.host.workers.channel import Channel
from vllmx_server.host.workers.counted import Counted
from vllmx_server.host.workers.messages import (
    CARDS,
    CORE_LOST,
    END,
    LEAVE,
    LOAD,
    RELAY,
    RELAY_END,
    RELAY_MORE,
    RELOAD,
    SHUT_DOWN,
    SLEEP,
    UNLOAD,
    USAGE,
    USED,
    WAKE,
    WAKE_IDLE,
    Begin,
    Relayed,
    RelayedAnswer,
    RelayedMore,
    Reload,
)
from vllmx_server.host.workers.pool import WorkerPool, asked_of_all
from vllmx_server.host.workers.remote_limiter import WorkerLimiter
from vllmx_server.limits.key_limiter import KeyLimiter
from vllmx_server.limits.keys import ApiKeys, reload_keys
from vllmx_server.limits.rate_limiter import RateLimiter, Unlimited
from vllmx_server.limits.usage import KeyUsage, UsageLedger
from vllmx_server.store.folder import temporary_folder
from vllmx_server.store.storage import Storage

logger = logging.getLogger("vllmx.supervisor")

_LEAVE_S = 1.0
"""A worker that has not let go of a model by then needs it."""


async def serve_with_workers(
    engine: EngineConfig,
    models: Sequence[ModelConfig],
    server: ServerConfig,
    listener: socket.socket,
    signals: Signals,
    on_ready: Callable[[CoreInfo], None],
    operators: socket.socket | None = None,
) -> None:
    """Serves until it is stopped. Raises what `run_server` does."""
    found = await asyncio.to_thread(find_model, engine, None)
    folder = None if server.data_dir else str(temporary_folder())
    door = CoreListener()
    starting = asyncio.ensure_future(ProcessFrontend.start(found, door))
    try:
        await asyncio.sleep(0)  # until the core's process is there
        stored = await _open_storage(server, folder)
        try:
            begin = Begin(
                server=server,
                core=ProcessFrontend(found).start_message,
                door=str(door.path),
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
        door.close()
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


async def _open_storage(server: ServerConfig, folder: str | None) -> Storage:
    """Holds the lock of the folder, in which workers find a database then."""
    path = server.data_dir or folder
    stored = Storage(path)
    try:
        await stored.check()
    except BaseException:
        stored.close()
        raise
    return stored


class Supervisor:
    """What becomes of the core and of the workers is told to all of them."""

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
        self._core: ProcessFrontend
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
        starting: asyncio.Future[ProcessFrontend],
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

    async def _started(self, starting: asyncio.Future[ProcessFrontend]) -> ProcessFrontend:
        """The core, when all workers serve it. Raises what either meets."""
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
        await asked_of_all(self._pool.channels(), END, type(None), timeout_s)

    def reload(self) -> None:
        """See `vllmx_server.host.signals.Serving`."""
        sound = self._server.ssl_certfile is not None and reload_certificate(self._server, None)
        found = Reload(keys=reload_keys(self._keys), certificate=sound)
        for channel in self._pool.channels():
            channel.tell(RELOAD, found)

    # --- what workers ask -------------------------------------------------------------------------
    def _serve_channel(self, channel: Channel) -> None:
        async def cards(_: None) -> list[ModelInfo]:
            return await self._host.cards()

        async def sleep(_: None) -> None:
            if self._is_busy:
                text = "requests are in flight: have the model sleep when they end"
                raise InvalidRequestError(text)
            await self._core.sleep()

        async def wake(_: None) -> None:
            await self._core.wake()

        async def wake_idle(_: None) -> bool:
            return await self._host.wake_idle()

        async def shut_down(_: None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        async def relay(relayed: Relayed) -> RelayedAnswer:
            return await self._pool.leader.ask(RELAY, relayed, RelayedAnswer)

        async def relay_more(number: int) -> RelayedMore:
            return await self._pool.leader.ask(RELAY_MORE, number, RelayedMore)

        async def relay_end(number: int) -> None:
            self._pool.leader.tell(RELAY_END, number)

        async def used(more: dict[str, KeyUsage]) -> None:
            self._usage.add(more)

        async def usage(_: None) -> dict[str, KeyUsage]:
            return dict(await self._usage.all())

        async def settle_all(limiter: WorkerLimiter) -> None:
            await channel.gone.wait()
            self._counted.bury(channel)
            await limiter.close()

        async def wake_for_it() -> None:  # a worker that starts again waits for the core
            with contextlib.suppress(VllmxError):
                await self._host.wake_idle()

        for each in (settle_all(WorkerLimiter(self._limiter, channel)), wake_for_it()):
            task = asyncio.ensure_future(each)
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)
        self._counted.serve(channel)
        channel.serve(USED, dict[str, KeyUsage], used)
        channel.serve(USAGE, type(None), usage)
        channel.serve(LOAD, str, self._host.load)
        channel.serve(UNLOAD, str, self._host.unload)
        channel.serve(CARDS, type(None), cards)
        channel.serve(SLEEP, type(None), sleep)
        channel.serve(WAKE, type(None), wake)
        channel.serve(WAKE_IDLE, type(None), wake_idle)
        channel.serve(SHUT_DOWN, type(None), shut_down)
        channel.serve(RELAY, Relayed, relay)
        channel.serve(RELAY_MORE, int, relay_more)
        channel.serve(RELAY_END, int, relay_end)

    async def _left_by_all(self, name: str) -> bool:
        channels = self._pool.channels()
        if name == self._first_name and not self._pool.is_whole:
            return False  # who starts waits for its core
        left = await asked_of_all(channels, LEAVE, bool, _LEAVE_S, name)
        return len(left) == len(channels) and all(left)

    def _note(self, stats: CoreStats) -> None:
        self._is_busy = bool(stats.num_running or stats.num_waiting)

    def _tell_lost(self, error: VllmxError) -> None:
        for channel in self._pool.channels():
            channel.tell(CORE_LOST, ErrorRecord.of(cause_of(error)))
