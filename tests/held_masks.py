"""Masks of grammars that are not there when the step wants them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from vllmx_core.plan import U32
from vllmx_engine.core import batch, grammar_rows
from vllmx_engine.core.grammar_rows import Later, MaskFill
from vllmx_engine.core.rows import RowTable
from vllmx_engine.grammar.matcher import MaskPace, Matcher

Hold = Callable[[], None]


class HeldMatcher:
    """A `Matcher` by another one, each of whose masks is held up first."""

    def __init__(self, inner: Matcher, hold: Hold) -> None:
        self._inner, self._hold = inner, hold
        self.is_accepting, self.is_stopped = inner.is_accepting, inner.is_stopped
        self.consume, self.rollback = inner.consume, inner.rollback
        self.forced_tokens = inner.forced_tokens

    def fill_mask(self, mask: U32) -> None:
        self._hold()
        self._inner.fill_mask(mask)

    def mend_mask(self, mask: U32) -> None:
        self._inner.mend_mask(mask)


@contextmanager
def held(hold: Hold) -> Iterator[None]:
    """Masks of rows that get their grammar meanwhile are held up."""
    with pytest.MonkeyPatch.context() as patch:

        def fill(matcher: Matcher, num_words: int, pace: MaskPace, later: Later) -> MaskFill:
            slow = MaskPace()
            slow.observe(math.inf)
            return MaskFill(HeldMatcher(matcher, hold), num_words, slow, later)

        patch.setattr(grammar_rows, "MaskFill", fill)
        yield


@contextmanager
def late_now_and_then() -> Iterator[list[int]]:
    """Every third mask of rows that get their grammar meanwhile takes 20 ms longer. Yields what
    will be the rows, as often as they are late."""
    rng, rows, take_back = random.Random(7), list[int](), RowTable.take_back

    def hold() -> None:
        if rng.randrange(3) == 0:
            time.sleep(0.02)

    def noted(table: RowTable, row: int, token: int) -> None:
        rows.append(row)
        take_back(table, row, token)

    with held(hold), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowTable, "take_back", noted)
        patch.setattr(batch, "PATIENCE_SHARE", 0.0)  # however long steps take
        yield rows
