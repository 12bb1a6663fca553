"""Masks that may take long are made on threads, so that nobody has to wait for them to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
from vllmx_core.plan import U32
from vllmx_core.system.processors import available_processors

from vllmx_engine.grammar.matcher import LexerLostError, MaskPace, Matcher

HELP_S = 0.001
"""The seconds after which more threads take up what the first ones have not come to: one of them
may be at a mask that takes long."""
_MAX_PARALLEL = 8
_MAX_THREADS = 16
"""The most masks that are under way at once: there are threads left where some take long."""
_LEAST_PARALLEL = 16
"""Fewer masks are made before another thread is awake."""


Later = Callable[[Callable[[], None]], object]
"""Runs a function on a thread that nobody waits for; a step that needs what it makes goes on."""


class MaskFill:
    """The making of a row's next mask, again for each of its tokens.

    Args:
        later: takes what needs as long as compiling the grammar.
    """

    __slots__ = (
        "_done",
        "_later",
        "_matcher",
        "_told",
        "error",
        "is_begun",
        "mask",
        "pace",
        "seconds",
        "was_mended",
    )

    def __init__(self, matcher: Matcher, num_words: int, pace: MaskPace, later: Later) -> None:
        self._matcher = matcher
        self._later = later
        self.pace = pace
        """The pace of its grammar."""
        self.mask: U32 = np.zeros(num_words, np.uint32)
        """(W,) what was made, once it is done."""
        self.error: Exception | None = None
        """Why it came to nothing, such as the GrammarError of a mask over its fuel."""
        self.seconds = 0.0
        """Processor time of the last mask, however many others wanted the processor."""
        self.is_begun = False
        """Somebody makes the mask, or has made it."""
        self.was_mended = False
        """The matcher replayed the answer before the mask was made."""
        self._done = False
        self._told: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        """The matcher is free again."""
        return self._done

    @property
    def is_quick(self) -> bool:
        """Nobody is at the mask, and it is likely to be made in no time: see `fill_now`."""
        return self.pace.is_quick and not self.is_begun

    def fill_now(self, mask: U32) -> None:
        """Makes the mask where it is wanted. Raises what the matcher does; after LexerLostError
        `run` makes the mask."""
        self._matcher.fill_mask(mask)

    def renew(self) -> None:
        """The matcher has gone on: what was made is not the next mask any more."""
        assert self._done or not self.is_begun, "a mask is under way"
        self.is_begun = self._done = self.was_mended = False
        self.error = None

    def run(self) -> None:
        """Makes the mask, or has it made later where that takes long."""
        started_s = time.thread_time()
        try:
            self._matcher.fill_mask(self.mask)
        except LexerLostError:
            self.pace.observe(time.thread_time() - started_s)
            self._mend_later()
            return
        except Exception as error:  # whatever a matcher raises is its row's
            self.error = error
        self.seconds = time.thread_time() - started_s
        self.pace.observe(self.seconds)
        self._finish()

    def _mend_later(self) -> None:
        try:
            self._later(self._mend)
        except RuntimeError as error:  # the threads were ended meanwhile
            self.error = error
            self._finish()

    def _mend(self) -> None:
        self.was_mended = True
        try:
            self._matcher.mend_mask(self.mask)
        except Exception as error:  # as in `run`
            self.error = error
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._tell()

    def when_done(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once, on whatever thread is there."""
        self._told.append(tell)
        if self._done:
            self._tell()

    def _tell(self) -> None:
        while self._told:
            try:
                tell = self._told.pop()
            except IndexError:  # the other thread was quicker
                return
            tell()

    def wait(self) -> None:
        """Waits until it is done, however long that takes."""
        done = threading.Event()
        self.when_done(done.set)
        done.wait()


class _Round:
    """Fills that several threads share."""

    def __init__(self, fills: list[MaskFill]) -> None:
        self.size = len(fills)
        self._rest = iter(sorted(fills, key=lambda fill: fill.seconds))
        self._num_done = count(1)
        self._all_done = threading.Lock()
        self._all_done.acquire()

    def work(self) -> None:
        """Takes one fill after the other, until none is left; the others that do so have theirs."""
        for fill in self._rest:
            fill.run()
            if next(self._num_done) == self.size:
                self._all_done.release()

    def wait(self, seconds: float) -> bool:
        """Whether all are done after so many seconds at most."""
        return self._all_done.acquire(timeout=max(0.0, seconds))


class MaskThreads:
    """Threads that make masks of a step, beside the one that runs the engine."""

    def __init__(self) -> None:
        self._most_parallel = max(1, min(available_processors() // 2, _MAX_PARALLEL))
        """Threads for many quick ones, where the model's own leave cores for them."""
        self._threads: ThreadPoolExecutor | None = None

    def is_worth_waking(self, num_quick: int) -> bool:
        """Whether several threads make the quick masks sooner than the caller's. Another thread has
        first to wake up, and on a processor that computes the model, to have its turn."""
        return self._most_parallel > 1 and num_quick >= 2 * _LEAST_PARALLEL

    def run(self, fills: list[MaskFill], patience: Callable[[], float]) -> None:
        """Runs fills that nobody has begun. Returns when all are done, or after `patience()`
        seconds, with some of them under way. Those that took long before come last."""
        for fill in fills:
            fill.is_begun = True
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MAX_THREADS, "vllmx-masks")
        shared = _Round(fills)
        for _ in range(min(max(1, len(fills) // _LEAST_PARALLEL), self._most_parallel)):
            self._threads.submit(shared.work)
        if shared.wait(HELP_S):
            return
        for _ in range(min(len(fills) - 1, _MAX_PARALLEL)):
            self._threads.submit(shared.work)
        shared.wait(patience() - HELP_S)

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
