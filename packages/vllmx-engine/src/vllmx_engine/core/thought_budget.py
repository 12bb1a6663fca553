"""The end of thoughts that have become too long: its tokens are forced."""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import U32

from vllmx_engine.core.grammar_row import GrammarRow
from vllmx_engine.core.mask_threads import MaskFill
from vllmx_engine.wire.grammars import Thoughts

_ALL = np.uint32(0xFFFFFFFF)


class ThoughtBudget:
    """What `GrammarRow` is to a sequence, around the one of its grammar, if it has one.

    The answer thinks from its beginning on, or if it begins with the tokens that say so. Once it
    has thought for as many tokens as it may, those of the end come next, whatever the model says.
    """

    __slots__ = ("_begin", "_forced", "_inner", "_num_left", "_recent", "_thoughts", "paused_step")

    def __init__(self, thoughts: Thoughts, inner: GrammarRow | None) -> None:
        self._thoughts = thoughts
        self._inner = inner
        self._begin: tuple[int, ...] = thoughts.begin_ids
        """The tokens of what begins thoughts that have not come."""
        self._num_left: int | None = thoughts.most_tokens
        """None: the thoughts are over, or there are none."""
        self._recent: list[int] = []
        self._forced: list[int] = []
        self.paused_step = -1
        self._force()

    @property
    def is_slow(self) -> bool:
        """See `GrammarRow`."""
        return self._inner is not None and self._inner.is_slow

    @property
    def is_free(self) -> bool:
        """See `GrammarRow`."""
        return not self._forced and (self._inner is None or self._inner.is_free)

    def accept(self, token: int) -> bool:
        """See `GrammarRow`."""
        if self._num_left is not None:
            self._think(token)
        return self._inner is not None and self._inner.accept(token)

    @property
    def has_ended(self) -> bool:
        """See `GrammarRow`."""
        return self._inner is not None and self._inner.has_ended

    def forced_tokens(self) -> list[int]:
        """See `GrammarRow`."""
        if self._forced or self._inner is None:
            return list(self._forced)
        return self._inner.forced_tokens()

    def next_fill(self) -> MaskFill | None:
        """See `GrammarRow`."""
        return None if self._forced or self._inner is None else self._inner.next_fill()

    def fill_mask(self, mask: U32) -> None:
        """See `GrammarRow`."""
        if self._forced:
            mask[:] = 0
            mask[self._forced[0] >> 5] = np.uint32(1 << (self._forced[0] & 31))
        elif self._inner is None:
            mask[:] = _ALL
        else:
            self._inner.fill_mask(mask)

    def _think(self, token: int) -> None:
        assert self._num_left is not None
        if self._forced:
            self._forced.pop(0)
            self._num_left = self._num_left if self._forced else None
        elif self._begin:
            is_next = token == self._begin[0]
            self._begin = self._begin[1:] if is_next else ()
            self._num_left = self._num_left if is_next else None
            self._force()
        else:
            self._num_left -= 1
            end = self._thoughts.end_ids
            self._recent = [*self._recent, token][-len(end) :]
            if tuple(self._recent) == end:
                self._num_left = None
            self._force()

    def _force(self) -> None:
        if self._num_left is not None and self._num_left <= 0 and not self._begin:
            self._forced = list(self._thoughts.end_ids)
