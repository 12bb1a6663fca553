"""A limit on the reasoning tokens of an answer."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from vllmx_core.plan import U32

from vllmx_engine.core.grammar_rows import GrammarRow, MaskFill
from vllmx_engine.wire.grammars import Thoughts

_ALL = np.uint32(0xFFFFFFFF)


class ThoughtBudget:
    """A `GrammarRow` with a limit on reasoning tokens, around the grammar's own row if there is
    one.

    The answer is reasoning from its beginning, or if it begins with the tokens that open it. After
    the allowed number of reasoning tokens, the tokens that end it are forced.
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
        return self._inner is not None and self._inner.is_slow

    @property
    def is_free(self) -> bool:
        return not self._forced and (self._inner is None or self._inner.is_free)

    def accept(self, token: int) -> bool:
        if self._num_left is not None:
            self._think(token)
        return self._inner is not None and self._inner.accept(token)

    @property
    def has_ended(self) -> bool:
        return self._inner is not None and self._inner.has_ended

    def forced_tokens(self) -> list[int]:
        if self._forced or self._inner is None:
            return list(self._forced)
        return self._inner.forced_tokens()

    def num_draftable(self, ids: list[int]) -> int:
        if self._forced or self._begin:
            return 0
        if self._num_left is not None:  # the end of the thoughts itself is not drafted
            ends = [place for place, token in enumerate(ids) if token == self._thoughts.end_ids[-1]]
            ids = ids[: min([max(0, self._num_left - 1), *ends])]
        return len(ids) if self._inner is None else self._inner.num_draftable(ids)

    def masks_behind(self, draft: list[int], masks: list[U32]) -> Generator[U32]:
        if self._inner is not None:
            yield from self._inner.masks_behind(draft, masks)
            return
        for mask in masks:
            mask[:] = _ALL
            yield mask

    def next_fill(self) -> MaskFill | None:
        return None if self._forced or self._inner is None else self._inner.next_fill()

    def fill_mask(self, mask: U32) -> None:
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
