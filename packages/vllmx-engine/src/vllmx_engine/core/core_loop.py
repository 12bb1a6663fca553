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

from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.watchdog import Watchdog
from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.ipc import (
    AbortRequests,
    AddRequest,
    FromCore,
    Outputs,
    Ping,
    Pong,
    PrefixCacheReset,
    ResetPrefixCache,
    Shutdown,
    Start,
    Stats,
    ToCore,
)
from vllmx_engine.wire.messages import CoreOutput, choices_of, is_piece

logger = logging.getLogger("vllmx.core")

STATS_INTERVAL_S = 0.5


class CoreLoop:
    """Owns the core; runs on the one thread that may touch it.

    Args:
        core: loaded.
        inbox: filled by other threads.
        emit: hands a message to the frontend without waiting; False when the frontend has not
            taken any for so long that all its requests must end.
        on_stuck: called once, on another thread, when a step does not come back.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: SimpleQueue[ToCore],
        emit: Callable[[FromCore], bool],
        on_stuck: Callable[[EngineDeadError], None],
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._emit = emit
        self._on_stuck = on_stuck
        self._stats_due_s = 0.0
        self._stopped = False

    def run(self) -> None:
        """Until a Shutdown message. What a step raises is a bug or a broken device: it is left to
        the caller."""
        with Watchdog(self._core, self._on_stuck):
            try:
                while not self._stopped:
                    self._take_messages()
                    if self._core.has_work and not self._stopped:
                        outputs = self._core.step()
                        if outputs and not self._emit_all(outputs):
                            self._end_all()
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

    def _take(self, message: ToCore) -> None:
        match message:
            case AddRequest(request, followers):
                for choice in choices_of(request, followers):
                    self._core.add(choice)
            case AbortRequests(request_ids):
                self._core.abort(request_ids)
                if not self._core.has_work:
                    self._report(time.monotonic())
            case ResetPrefixCache(call_id):
                self._emit(PrefixCacheReset(call_id, self._core.reset_prefix_cache()))
            case Vocabulary():
                self._core.set_vocabulary(message)
            case Shutdown():
                self._stopped = True
            case Start():
                logger.error("a second start message is ignored")
            case Ping():
                self._emit(Pong())

    def _emit_all(self, outputs: list[CoreOutput]) -> bool:
        """In one message, but for pieces of prompts' log-probabilities, which come first: each is
        as much as the other side should have to decode at once."""
        num_pieces, taken = 0, True
        while num_pieces < len(outputs) and is_piece(outputs[num_pieces]):
            taken &= self._emit(Outputs([outputs[num_pieces]]))
            num_pieces += 1
        rest = outputs[num_pieces:] if num_pieces else outputs
        return taken and (not rest or self._emit(Outputs(rest)))

    def _end_all(self) -> None:
        """Nobody reads: computing on would fill the memory with updates."""
        ids = self._core.request_ids
        self._core.abort(ids)
        text = (
            "the API process did not take what the engine core sent: too much of it waited, so"
            " every request in flight was ended"
        )
        logger.error("%s (%d)", text, len(ids))
        code = EngineDeadError.code
        self._emit(
            Outputs(
                [
                    CoreOutput(
                        request_id=one, ids=[], finish_reason="error", error=text, error_code=code
                    )
                    for one in ids
                ]
            )
        )

    def _report(self, now_s: float) -> None:
        """Counters: with the first step of new work, every half second, and when it is done."""
        busy = self._core.has_work
        if now_s >= self._stats_due_s or not busy:
            self._stats_due_s = now_s + STATS_INTERVAL_S if busy else 0.0
            self._emit(Stats(self._core.stats()))
