"""The state of one answer in its grammar."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Executor, Future

import numpy as np
from vllmx_core.plan import U32

from vllmx_engine.grammar.matcher import CompiledGrammar, GrammarMatcher
from vllmx_engine.wire.grammars import FreePart

_ALL = np.uint32(0xFFFFFFFF)
SLOW_S = 0.002
"""A row whose masks take longer must not hold up the rows beside it."""


class GrammarRow:
    """A matcher that begins with the answer, or behind its `free` part.

    The core's thread owns it, but for the time of `prepare`.
    """

    __slots__ = (
        "_begin",
        "_ends",
        "_first_mask",
        "_held_ids",
        "_is_free",
        "_matcher",
        "_num_begun",
        "_num_words",
        "_preparing",
        "_recent",
        "_was_slow",
        "is_slow",
        "paused_step",
    )

    def __init__(self, compiled: CompiledGrammar, free: FreePart | None = None) -> None:
        self._matcher: GrammarMatcher = compiled.start()
        self._first_mask: U32 | None = compiled.first_mask
        """The mask of the first token, while nothing was consumed."""
        self._num_words = compiled.first_mask.size
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
        self._preparing: Future[U32] | None = None
        """The next mask, made on another thread."""
        self.is_slow = compiled.repeated_mask_s > SLOW_S
        """Whether its masks are made between steps, in which it sits out."""
        self._was_slow = False
        """Whether its last mask took long: two in a row, or it may be that another process had its
        turn."""
        self.paused_step = -1
        """The step behind which it does so."""

    @property
    def is_free(self) -> bool:
        """The grammar has not begun."""
        return self._is_free

    def accept(self, token: int) -> bool:
        """Takes a token of the answer in; true when the answer can only end now. Raises
        GrammarError."""
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
        self._first_mask = self._preparing = None
        self._matcher.consume(token)
        return self._matcher.is_stopped

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, in this order. None where looking for them takes long."""
        if self._is_free or self._begin or self.is_slow:
            return []
        return self._matcher.forced_tokens()

    def prepare(self, threads: Executor) -> Future[U32]:
        """Makes the next mask on another thread."""
        self._preparing = threads.submit(self._make_mask)
        return self._preparing

    def fill_mask(self, mask: U32) -> None:
        """(W,) the tokens that may come next, as `Matcher.fill_mask`."""
        if self._is_free:
            self._fill_free(mask)
        elif self._first_mask is not None:
            self._fill_first(mask)
        elif self._preparing is not None:
            mask[:] = self._preparing.result()
        else:
            started_s = time.perf_counter()
            self._matcher.fill_mask(mask)
            was_slow, self._was_slow = self._was_slow, time.perf_counter() - started_s > SLOW_S
            self.is_slow = self.is_slow or (was_slow and self._was_slow)

    @property
    def due(self) -> GrammarMatcher | None:
        """What must make the next mask now; None where `fill_mask` has it from elsewhere, and for a
        row that was slow last time, which `fill_mask` measures."""
        if self._is_free or self._first_mask is not None or self._preparing is not None:
            return None
        return None if self._was_slow else self._matcher

    def _make_mask(self) -> U32:
        mask = np.zeros(self._num_words, np.uint32)
        if self._is_free:
            self._fill_free(mask)
        elif self._begin:
            self._fill_first(mask)
        else:
            self._matcher.fill_mask(mask)
        return mask

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
