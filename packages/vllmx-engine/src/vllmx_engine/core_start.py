"""The start of an engine core, in a process of its own or on a thread for tests and debugging.

This module imports little, so that the core's process can load the model while the calling process
imports the rest, which takes about as long as the core's own imports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, VllmxError
from vllmx_core.plugins.registry import Registry

from vllmx_engine.core.found_model import FoundModel, find_model
from vllmx_engine.link.frontend import CoreFrontend, Frontend, lost_with
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.wire.ipc import FromCore, Ready, Shutdown, ToCore
from vllmx_engine.wire.messages import CoreInfo

if TYPE_CHECKING:
    from vllmx_engine.core.core_loop import Inbox


logger = logging.getLogger("vllmx.supervisor")

T = TypeVar("T")


class ThreadFrontend(CoreFrontend):
    """The core on a thread of this process. It is not restarted when it dies."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox = SimpleQueue()
        self._ready: asyncio.Future[CoreInfo] = self._loop.create_future()
        self._left = asyncio.Event()
        self._thread: Thread

    @classmethod
    async def start(cls, found: FoundModel) -> ThreadFrontend:
        """Loads the model. Raises the VllmxError that this met."""
        frontend = cls()
        frontend._thread = Thread(
            target=frontend._run, args=(found,), name="vllmx-core", daemon=True
        )
        frontend._thread.start()
        try:
            frontend.info = await asyncio.shield(frontend._ready)
        except asyncio.CancelledError:
            await frontend.close()
            raise
        return frontend

    async def close(self) -> None:
        self.status = "closed"
        self._inbox.put(Shutdown())
        await self._left.wait()

    def _send(self, message: ToCore) -> None:
        self._inbox.put(message)

    def _run(self, found: FoundModel) -> None:
        """The core's thread. What a core is made of is imported here: a server, whose core has a
        process of its own, is ready sooner without."""
        from vllmx_engine.core.core_loop import CoreLoop
        from vllmx_engine.core.load import load_core

        try:
            core, info = load_core(found)
            self._emit(Ready(info))
            on_stuck = partial(self._on_loop, self._abandon_thread)
            CoreLoop(core, self._inbox, self._emit, on_stuck, found).run()
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
            self._tell_lost(lost_with(error, error.message))

    def _leave(self, _: None) -> None:
        """The thread is done."""
        self._left.set()

    def _abandon_thread(self, error: EngineDeadError) -> None:
        """Gives up a thread that will never end; should it end after all, it finds a request to
        stop."""
        self._inbox.put(Shutdown())
        self._die(error)
        self._left.set()


async def _start(found: FoundModel) -> Frontend:
    if found.config.replicas == 1 and found.config.replica_hosts is None:
        return await ProcessFrontend.start(found)
    from vllmx_engine.replicas.start import start_frontend  # few starts need it

    return await start_frontend(found)


class CoreStart:
    """A core that loads its model. Made by `begin`; leaving it as a context ends the core, unless
    `ready` has handed it out.

    Attributes:
        found: what it loads.
    """

    def __init__(self, found: FoundModel, starting: asyncio.Future[Frontend]) -> None:
        self.found = found
        self._starting = starting
        self._is_taken = False

    @classmethod
    async def begin(
        cls, config: EngineConfig, registry: Registry | None = None, *, in_process: bool = False
    ) -> Self:
        """Finds the model and returns when the core's process, or its thread, has begun. The
        arguments are those of `AsyncLLM.start`. Raises what `find_model` raises."""
        found = await asyncio.to_thread(find_model, config, registry)
        starting: asyncio.Future[Frontend] = asyncio.ensure_future(
            ThreadFrontend.start(found) if in_process else _start(found)
        )
        await asyncio.sleep(0)  # until its first wait, by when the process is there
        return cls(found, starting)

    async def ready(self) -> Frontend:
        """The way to the core, whose end is the caller's business from now on. Raises the
        VllmxError that loading met."""
        frontend = await self._starting
        self._is_taken = True
        return frontend

    async def cancel(self) -> None:
        """Ends the core. Does nothing once it was handed out."""
        if self._is_taken:
            return
        self._starting.cancel()
        await asyncio.wait([self._starting])
        if not self._starting.cancelled() and self._starting.exception() is None:
            await self._starting.result().close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel()
