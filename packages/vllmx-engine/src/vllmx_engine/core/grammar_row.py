"""The state of one answer in its grammar."""

from __future__ import annotations

from collections import deque

import numpy as np
from vllmx_core.plan import U32

from vllmx_engine.core.mask_threads import Later, MaskFill
from vllmx_engine.grammar.matcher import CompiledGrammar, Matcher
from vllmx_engine.wire.grammars import FreePart

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
        """Whether its masks are made between steps, in which it sits out."""
        self._was_slow = False
        """Whether its last mask took long: a single one may be the machine's."""
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

    def next_fill(self) -> MaskFill | None:
        """What makes the next mask, if it takes any time; `fill_mask` wants it done."""
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
