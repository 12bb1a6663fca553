"""An engine core on a thread of this process: for tests and debugging."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from vllmx_core.errors import EngineDeadError, VllmxError

from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.frontend import CoreFrontend, lost_with
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
        """See `Frontend.close`."""
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
            self._tell_lost(lost_with(error, error.message))

    def _leave(self, _: None) -> None:
        """The thread is done."""
        self._left.set()

    def _abandon_thread(self, error: EngineDeadError) -> None:
        """The thread will never be done; should it be after all, it is told to stop."""
        self._inbox.put(Shutdown())
        self._die(error)
        self._left.set()
