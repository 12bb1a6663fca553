"""Masks are filled on threads of their own, so that nobody has to wait for them to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
from vllmx_core.plan import U32
from vllmx_core.processors import available_processors

from vllmx_engine.grammar.matcher import Matcher

HELP_S = 0.001
"""The seconds after which more threads take up what the first ones have not come to: one of them
may be at a mask that takes long."""
_MAX_PARALLEL = 8
_MAX_THREADS = 16
"""So many masks that take long are under way at once, and those of other rows still get made."""
_LEAST_PARALLEL = 16
"""Fewer masks are made before another thread is awake."""


class MaskFill:
    """The making of a row's next mask, again for each of its tokens."""

    __slots__ = ("_done", "_matcher", "_told", "error", "is_begun", "mask", "seconds")

    def __init__(self, matcher: Matcher, num_words: int) -> None:
        self._matcher = matcher
        self.mask: U32 = np.zeros(num_words, np.uint32)
        """(W,) what was made, once it is done."""
        self.error: Exception | None = None
        """Why it came to nothing, such as the GrammarError of a mask over its fuel."""
        self.seconds = 0.0
        """Processor time of the last mask, however many others wanted the processor."""
        self.is_begun = False
        """Somebody makes the mask, or has made it."""
        self._done = False
        self._told: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        """The matcher is free again."""
        return self._done

    def renew(self) -> None:
        """The matcher has gone on: what was made is not the next mask any more."""
        assert self._done or not self.is_begun, "a mask is under way"
        self.is_begun = self._done = False
        self.error = None

    def run(self) -> None:
        """Makes the mask."""
        started_s = time.thread_time()
        try:
            self._matcher.fill_mask(self.mask)
        except Exception as error:  # whatever a matcher raises is its row's
            self.error = error
        self.seconds = time.thread_time() - started_s
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


class MaskThreads:
    """Runs fills on threads, several at once where the model's own threads leave cores for them."""

    def __init__(self) -> None:
        self._most_parallel = max(1, min(available_processors() // 2, _MAX_PARALLEL))
        self._threads: ThreadPoolExecutor | None = None

    def run(self, fills: list[MaskFill], patience: Callable[[], float]) -> None:
        """Runs fills that nobody has begun. Returns when all are done, or after `patience()`
        seconds, with some of them under way. Those that took long before come last."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MAX_THREADS, "vllmx-masks")
        for fill in fills:
            fill.is_begun = True
        rest = iter(sorted(fills, key=lambda fill: fill.seconds))
        all_done = threading.Lock()
        all_done.acquire()
        finished, total = count(1), len(fills)

        def work() -> None:
            for fill in rest:  # threads share it: each takes the next
                fill.run()
                if next(finished) == total:
                    all_done.release()

        for _ in range(min(1 + total // _LEAST_PARALLEL, self._most_parallel)):
            self._threads.submit(work)
        if all_done.acquire(timeout=HELP_S):
            return
        for _ in range(min(total - 1, _MAX_PARALLEL)):
            self._threads.submit(work)
        all_done.acquire(timeout=max(0.0, patience() - HELP_S))

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
