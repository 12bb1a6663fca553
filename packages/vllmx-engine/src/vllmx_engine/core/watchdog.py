"""Notices that a step does not come back: a kernel without an end, a lost GPU, a stuck driver call.

Nothing can be done for the thread in such a call. So callers that wait for the core give up, and
the process of the core ends, which is what frees a device.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Self

from vllmx_core.errors import EngineDeadError, StepTimeoutError, listing

from vllmx_engine.core.engine_core import EngineCore

logger = logging.getLogger("vllmx.watchdog")

_LOOKS = 20
"""The number of looks in the time that a step has."""
_SHORTEST_S, _LONGEST_S = 0.01, 1.0


class StepWatch:
    """One watcher's view of a core. It is asked every `interval_s` or so.

    Between two looks no more than twice that counts, so that a process that was stopped as a whole
    (a debugger, a frozen container, a machine asleep) is not taken for one that hangs. The core
    pays two additions a step and no clock.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._limit_s = core.step_timeout_s
        self.interval_s: float | None = None
        """None: the core is not watched."""
        if self._limit_s > 0:
            self.interval_s = min(max(self._limit_s / _LOOKS, _SHORTEST_S), _LONGEST_S)
        self._calls, self._seen_s, self._looked_s = -1, 0.0, 0.0

    def stuck(self) -> EngineDeadError | None:
        """Why the core must be given up, if it must."""
        failure = self._core.failure
        if failure is not None:
            return failure
        if self.interval_s is None:
            return None
        now_s, calls = time.monotonic(), self._core.activity.calls
        if calls != self._calls or calls % 2 == 0:
            self._calls, self._seen_s, self._looked_s = calls, 0.0, now_s
            return None
        self._seen_s += min(now_s - self._looked_s, 2 * self.interval_s)
        self._looked_s = now_s
        return self._verdict() if self._seen_s >= self._limit_s else None

    def _verdict(self) -> StepTimeoutError:
        activity, info = self._core.activity, self._core.model_info
        return StepTimeoutError(
            f"{info.backend} ({info.device}) hangs: {activity.doing}{_size(self._core)} has taken"
            f" more than {self._limit_s:g} s (--step-timeout-s)"
        )


def _size(core: EngineCore) -> str:
    batch = core.activity.batch
    if batch is None:
        return ""
    tokens = len(batch.decodes) + batch.load.chunk_tokens
    return (
        f" of {tokens} tokens ({len(batch.decodes)} decoding sequences, {len(batch.chunks)} chunks"
        f" of prompts with {batch.load.chunk_tokens} tokens)"
    )


def log_stuck(error: EngineDeadError, core: EngineCore) -> None:
    """Logs the hanging step, its requests, and the stack of each thread of this process."""
    logger.critical("%s\n%s%s", error.message, _requests(core), _stacks())


def _requests(core: EngineCore) -> str:
    batch = core.activity.batch
    if batch is None:
        return ""
    names = [sequence.request.shown for sequence in core.sequences_of(batch)]
    return f"requests in it: {listing(names)}\n" if names else ""


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    return "".join(parts)


class Watchdog:
    """Watches a core from a thread of its own, while the `with` block runs.

    Args:
        on_stuck: called once, on that thread, after the log was written.
    """

    def __init__(self, core: EngineCore, on_stuck: Callable[[EngineDeadError], None]) -> None:
        self._core = core
        self._watch = StepWatch(core)
        self._on_stuck = on_stuck
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._watch.interval_s is not None:
            threading.Thread(target=self._run, name="vllmx-watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._watch.interval_s):
            error = self._watch.stuck()
            if error is not None:
                log_stuck(error, self._core)
                self._on_stuck(error)
                return
