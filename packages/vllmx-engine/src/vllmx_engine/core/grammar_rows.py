"""Threads that fill masks of grammars, and the grammar of a row."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import numpy as np
from vllmx_core.plan import U32
from vllmx_core.system.processors import available_processors

from vllmx_engine.grammar.matcher import CompiledGrammar, LexerLostError, MaskPace, Matcher
from vllmx_engine.wire.grammars import FreePart

HELP_S = 0.001
"""Seconds until more threads take the masks that the first ones have not begun: one of them may be
held up by a slow mask."""
_MAX_PARALLEL = 8
_MAX_THREADS = 16
"""The most masks that are under way at once: there are threads left where some take long."""
_LEAST_PARALLEL = 16
"""Fewer masks are made before another thread is awake."""


Later = Callable[[Callable[[], None]], object]
"""Runs a function on a background thread; a step that needs its result goes on without it."""


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
        """The error that ended it, such as the GrammarError of a mask over its fuel."""
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
        """Waits; True if all are done after at most this many seconds."""
        return self._all_done.acquire(timeout=max(0.0, seconds))


class MaskThreads:
    """Threads that fill masks of a step, in addition to the engine's thread."""

    def __init__(self) -> None:
        self._most_parallel = max(1, min(available_processors() // 2, _MAX_PARALLEL))
        """Threads for many quick ones, where the model's own leave cores for them."""
        self._threads: ThreadPoolExecutor | None = None

    def is_worth_waking(self, num_quick: int) -> bool:
        """True if several threads fill the quick masks sooner than the calling one. Another thread
        has to wake up first and, on a processor that computes the model, to be scheduled."""
        return self._most_parallel > 1 and num_quick >= 2 * _LEAST_PARALLEL

    def run(self, fills: list[MaskFill], patience: Callable[[], float]) -> None:
        """Runs fills that have not begun. Returns when all are done, or after `patience()`
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


_ALL = np.uint32(0xFFFFFFFF)
SLOW_S = 0.002
"""A row whose masks take longer sits out while they are made."""


class GrammarRow:
    """A matcher that begins with the answer, or behind its `free` part.

    The core's thread owns it, and leaves the matcher alone while `next_fill` is under way.

    Args:
        later: see `MaskFill`.
    """

    __slots__ = (
        "_begin",
        "_ends",
        "_fill",
        "_first_mask",
        "_held_ids",
        "_is_free",
        "_matcher",
        "_num_begun",
        "_recent",
        "_was_slow",
        "is_slow",
        "paused_step",
    )

    def __init__(
        self, compiled: CompiledGrammar, free: FreePart | None = None, *, later: Later
    ) -> None:
        self._matcher: Matcher = compiled.start()
        self._first_mask: U32 | None = compiled.first_mask
        """The mask of the first token, while nothing was consumed."""
        self._fill = MaskFill(self._matcher, compiled.first_mask.size, compiled.pace, later)
        self._ends: tuple[tuple[int, ...], ...] = () if free is None else free.ends
        self._begin: tuple[int, ...] = () if free is None else free.begin_ids
        """The ids that begin a free part, while they have not come and still may."""
        self._held_ids: tuple[int, ...] = () if free is None else free.held_ids
        self._num_begun = 0
        """The number of them that have come."""
        self._is_free = free is not None and not self._begin
        if self._begin and _is_set(compiled.first_mask, self._begin[0]):
            self._begin = ()  # the grammar has such a part itself
        self._recent: deque[int] = deque(maxlen=max(map(len, self._ends), default=0))
        self.is_slow = compiled.repeated_mask_s > SLOW_S
        """True if its masks are filled between steps, which it sits out."""
        self._was_slow = False
        """True if its last mask took long; a single slow mask may be the machine's."""
        self.paused_step = -1
        """The step behind which it does so."""

    @property
    def is_free(self) -> bool:
        """The grammar has not begun."""
        return self._is_free

    def accept(self, token: int) -> bool:
        """Takes a token of the answer in; true when the answer can only end now. Where the
        grammar's lexer is lost, `has_ended` says so later. Raises GrammarError."""
        if self._is_free:
            self._recent.append(token)
            recent = tuple(self._recent)
            self._is_free = not any(recent[-len(end) :] == end for end in self._ends)
            return False
        if self._begin and token == self._begin[self._num_begun]:
            self._num_begun += 1
            if self._num_begun == len(self._begin):
                self._begin, self._is_free = (), True
            return False
        self._begin = ()
        self._first_mask = None
        self._fill.renew()
        self._matcher.consume(token)
        return self._matcher.is_stopped

    @property
    def has_ended(self) -> bool:
        """The answer can only end here, as the mask that was just made shows."""
        return self._fill.was_mended and self._matcher.is_stopped

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, in this order. None where looking for them takes long."""
        if self._is_free or self._begin or self.is_slow:
            return []
        return self._matcher.forced_tokens()

    def num_draftable(self, ids: list[int]) -> int:
        """The number of the first of these tokens that may come next, one behind the other, and
        behind which masks are likely to be made in no time."""
        if self._is_free:
            recent = tuple(self._recent)
            for place, token in enumerate(ids):
                recent = (*recent, token)
                if any(recent[-len(end) :] == end for end in self._ends):
                    return place
            return len(ids)
        if self._begin or self.is_slow or not self._fill.is_quick:
            return 0
        return self._matcher.num_allowed(ids)

    def masks_behind(self, draft: list[int], masks: list[U32]) -> Generator[U32]:
        """Fills and yields the next mask, then the ones behind each token of a draft, whose tokens
        were all `num_draftable`. Raises what `Matcher.fill_mask` does."""
        num_taken = 0
        try:
            for place, mask in enumerate(masks):
                if self._is_free:
                    self._fill_free(mask)
                elif place == 0 and self._first_mask is not None:
                    self._fill_first(mask)
                else:
                    started_s = time.thread_time()
                    self._matcher.fill_mask(mask)
                    self._fill.pace.observe(time.thread_time() - started_s)
                yield mask
                if place < len(draft) and not self._is_free:
                    self._matcher.consume(draft[place])
                    num_taken += 1
        finally:
            with suppress(LexerLostError):  # the next mask tells
                self._matcher.rollback(num_taken)

    def next_fill(self) -> MaskFill | None:
        """Returns the fill of the next mask, if that takes time; `fill_mask` expects it to be
        done."""
        return None if self._is_free or self._first_mask is not None else self._fill

    def fill_mask(self, mask: U32) -> None:
        """(W,) the tokens that may come next, as `Matcher.fill_mask`."""
        if self._is_free:
            self._fill_free(mask)
        elif self._first_mask is not None:
            self._fill_first(mask)
        else:
            self._take(mask)

    def _take(self, mask: U32) -> None:
        """The mask that was made. Raises what came instead."""
        assert self._fill.is_done, "the mask is not there yet"
        if self._fill.error is not None:
            raise self._fill.error
        mask[:] = self._fill.mask
        was_slow, self._was_slow = self._was_slow, self._fill.seconds > SLOW_S
        self.is_slow = self.is_slow or (was_slow and self._was_slow)

    def _fill_free(self, mask: U32) -> None:
        mask[:] = _ALL
        for token in self._held_ids:
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))

    def _fill_first(self, mask: U32) -> None:
        """The mask while the grammar has consumed nothing, and a free part may begin."""
        assert self._first_mask is not None, "the grammar has begun"
        mask[:] = 0 if self._num_begun and self._begin else self._first_mask
        if self._begin:
            token = self._begin[self._num_begun]
            mask[token >> 5] |= np.uint32(1 << (token & 31))


def _is_set(mask: U32, token: int) -> bool:
    return bool(mask[token >> 5] & np.uint32(1 << (token & 31)))
