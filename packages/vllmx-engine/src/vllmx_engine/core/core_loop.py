"""The loop around an engine core: messages in, steps, updates out.

The same loop runs in the core process (messages come from a socket) and on a thread of the API
process (from the frontend itself). Between steps it takes whatever messages have come, without
waiting; with nothing to do it sleeps until one comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from vllmx_core.errors import EngineDeadError

from vllmx_engine.core.clients import (
    Client,
    Clients,
    Joined,
    Left,
    Said,
    end_all,
    refuse_foreign,
)
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.watchdog import Watchdog
from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.ipc import (
    AbortRequests,
    AddRequest,
    FromCore,
    Ping,
    Pong,
    PrefixCacheReset,
    ResetPrefixCache,
    Shutdown,
    Start,
    Stats,
    ToCore,
)
from vllmx_engine.wire.messages import choices_of

logger = logging.getLogger("vllmx.core")

STATS_INTERVAL_S = 0.5
Inbox = SimpleQueue[ToCore | Joined | Left | Said]


class CoreLoop:
    """Owns the core; runs on the one thread that may touch it.

    Args:
        core: loaded.
        inbox: filled by other threads: what the owner says, and what concerns further clients.
        emit: hands a message to the owner, see `Client`.
        on_stuck: called once, on another thread, when a step does not come back.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        emit: Callable[[FromCore], bool],
        on_stuck: Callable[[EngineDeadError], None],
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._clients = Clients(emit)
        self._on_stuck = on_stuck
        self._stats_due_s = 0.0
        self._stopped = False

    def run(self) -> None:
        """Runs steps until a Shutdown message. What a step raises is a bug or a broken device: it
        is left to the caller."""
        with Watchdog(self._core, self._on_stuck):
            try:
                while not self._stopped:
                    self._take_messages()
                    if self._core.has_work and not self._stopped:
                        outputs = self._core.step()
                        if outputs:
                            for client in self._clients.spread(outputs):
                                self._end(client)
                        self._report(time.monotonic())
            finally:
                self._core.close()

    def _take_messages(self) -> None:
        """Takes all that have come; waits for one when there is nothing to do."""
        try:
            while not self._stopped:
                self._take(self._inbox.get(block=not self._core.has_work))
        except Empty:
            pass

    def _take(self, message: ToCore | Joined | Left | Said) -> None:
        match message:
            case Said(client, said):
                self._answer(client, said)
            case Joined(client):
                self._clients.add(client)
                client.emit(Stats(self._core.stats()))
            case Left(client):
                self._clients.remove(client)
                self._abort(self._ids_of(client))
            case Shutdown():
                self._stopped = True
            case Start():
                logger.error("a second start message is ignored")
            case _:
                self._answer(self._clients.owner, message)

    def _answer(self, client: Client, message: ToCore) -> None:
        match message:
            case AddRequest(request, followers):
                choices = choices_of(request, followers)
                if any(refuse_foreign(client, choice) for choice in choices):
                    return
                for choice in choices:
                    self._core.add(choice)
            case AbortRequests(request_ids):
                self._abort([one for one in request_ids if client.owns(one)])
            case ResetPrefixCache(call_id):
                client.emit(PrefixCacheReset(call_id, self._core.reset_prefix_cache()))
            case Vocabulary():
                self._core.set_vocabulary(message)
            case Ping():
                client.emit(Pong())
            case _:
                logger.error("only who started the core may send %s", type(message).__name__)

    def _abort(self, request_ids: list[str]) -> None:
        self._core.abort(request_ids)
        if not self._core.has_work:
            self._report(time.monotonic())

    def _end(self, client: Client) -> None:
        """It does not read: computing on would fill the memory with updates."""
        ids = self._ids_of(client)
        self._core.abort(ids)
        end_all(client, ids)

    def _ids_of(self, client: Client) -> list[str]:
        return [one for one in self._core.request_ids if client.owns(one)]

    def _report(self, now_s: float) -> None:
        """Counters: with the first step of new work, every half second, and when it is done."""
        busy = self._core.has_work
        if now_s >= self._stats_due_s or not busy:
            self._stats_due_s = now_s + STATS_INTERVAL_S if busy else 0.0
            self._clients.tell_all(Stats(self._core.stats()))
