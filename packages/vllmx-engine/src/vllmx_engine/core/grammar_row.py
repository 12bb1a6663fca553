"""The state of one answer in its grammar."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Executor, Future

import numpy as np
from vllmx_core.plan import U32

from vllmx_engine.grammar.matcher import CompiledGrammar, GrammarMatcher

_ALL = np.uint32(0xFFFFFFFF)
SLOW_S = 0.002
"""A row whose masks take longer must not hold up the rows beside it."""


class GrammarRow:
    """A matcher that begins with the answer, or behind the token ids `after_ids` of it.

    The core's thread owns it, but for the time of `prepare`.
    """

    __slots__ = (
        "_after",
        "_first_mask",
        "_matcher",
        "_num_words",
        "_preparing",
        "_recent",
        "_was_slow",
        "is_slow",
        "paused_step",
    )

    def __init__(self, compiled: CompiledGrammar, after_ids: tuple[int, ...] = ()) -> None:
        self._matcher: GrammarMatcher = compiled.start()
        self._first_mask: U32 | None = compiled.first_mask
        """The mask of the first token, while nothing was consumed."""
        self._num_words = compiled.first_mask.size
        self._after: tuple[int, ...] | None = after_ids or None
        """The ids after which the grammar begins, while they have not come."""
        self._recent: deque[int] = deque(maxlen=len(after_ids))
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
        """Anything may come next: the grammar has not begun."""
        return self._after is not None

    def accept(self, token: int) -> bool:
        """Takes a token of the answer in; true when the answer can only end now. Raises
        GrammarError."""
        if self._after is not None:
            self._recent.append(token)
            if tuple(self._recent) == self._after:
                self._after = None
            return False
        self._first_mask = self._preparing = None
        self._matcher.consume(token)
        return self._matcher.is_stopped

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, in this order. None where looking for them takes long."""
        return [] if self.is_free or self.is_slow else self._matcher.forced_tokens()

    def prepare(self, threads: Executor) -> Future[U32]:
        """Makes the next mask on another thread."""
        self._preparing = threads.submit(self._make_mask)
        return self._preparing

    def fill_mask(self, mask: U32) -> None:
        """(W,) the tokens that may come next, as `Matcher.fill_mask`."""
        if self._after is not None:
            mask[:] = _ALL
        elif self._first_mask is not None:
            mask[:] = self._first_mask
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
        if self._after is not None or self._first_mask is not None or self._preparing is not None:
            return None
        return None if self._was_slow else self._matcher

    def _make_mask(self) -> U32:
        mask = np.zeros(self._num_words, np.uint32)
        if self._after is None:
            self._matcher.fill_mask(mask)
        else:
            mask[:] = _ALL
        return mask
