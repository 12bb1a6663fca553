"""What work of lower priority may add to a step in which rows of a higher one decode."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from vllmx_core.plan import AnyArray

from vllmx_engine.core.cost import StepCost, StepLoad
from vllmx_engine.core.rows import RowTable

_HOLDS_ON_S = 1.0
"""Seconds of steps in which lower priorities still give way to a better one that has left."""


class Beside:
    """Rows of lower priority than the best that is there get a share of its steps: as many of them
    as that holds, in turn, and chunks of their prompts with the time that they leave. A step takes
    so much longer than it would without them, however many of them there are.

    The share holds on for a while when the best has left. Who asks for short answers is mostly not
    there when a step begins, and waits for the step that it meets.

    Attributes:
        rank: the best priority that decodes; None where nobody is held back.
        seconds: what chunks of lower priority may add to the step that is being made.
    """

    def __init__(self, table: RowTable, cost: StepCost) -> None:
        self._table = table
        self._cost = cost
        self._next = 0
        """The row whose turn it is."""
        self._front: int | None = None
        """The priority that lower ones give way to."""
        self._last_best, self._left_s = 0, 0.0
        """The best priority that was there with others, and for how many seconds of steps others
        go on to give way to it."""
        self.rank: int | None = None
        self.seconds = math.inf

    def choose(self, rows: AnyArray, live: Collection[int], *, has_prompts: bool) -> AnyArray:
        """The rows, among these, that decode in the next step.

        Args:
            live: the priorities that are there.
            has_prompts: some wait for chunks, for which half of the share is kept.
        """
        self.rank, self.seconds = None, math.inf
        self._front = self._best_of(live)
        if self._front is None:
            return rows
        ranks = self._table.rank[rows]
        best, lower = rows[ranks <= self._front], rows[ranks > self._front]
        if rows.size:
            self.rank = int(ranks.min())
        self.seconds = self._cost.share_seconds(*(self._load(best) if best.size else (1, 1)))
        if lower.size:
            lower = self._in_turn(lower, has_prompts=has_prompts, with_best=best.size > 0)
            rows = np.sort(np.concatenate([best, lower]))
        if len(live) == 1:
            self._left_s -= self._cost.predict(StepLoad(*self._load(rows)))
        return rows

    def _in_turn(self, lower: AnyArray, *, has_prompts: bool, with_best: bool) -> AnyArray:
        """The lower rows that the step has room for, at least one. A step without better rows takes
        as much longer than that one row as a step with them would."""
        affordable_s = self.seconds / 2 if has_prompts else self.seconds
        each_s = self._cost.decode_seconds(*self._load(lower)) / lower.size
        if not with_best:
            affordable_s += each_s
        if each_s * lower.size > affordable_s:
            count = max(1, int(affordable_s / each_s))
            lower = np.roll(lower, -int(np.searchsorted(lower, self._next)))[:count]
            self._next = int(lower[-1]) + 1
        self.seconds = max(0.0, self.seconds - each_s * (lower.size - (not with_best)))
        return lower

    def _best_of(self, live: Collection[int]) -> int | None:
        """The priority that lower ones give way to; None where there are none."""
        if not live:
            return None
        best = min(live)
        if len(live) > 1:
            self._last_best, self._left_s = best, _HOLDS_ON_S
            return best
        return self._last_best if self._left_s > 0 and self._last_best < best else None

    def yields_to(self, rank: int) -> bool:
        """Whether all that decodes has a lower priority than this."""
        return self.rank is not None and rank < self.rank

    def holds_back(self, rank: int) -> bool:
        """Whether this priority gives way to a better one."""
        return self._front is not None and rank > self._front

    def _load(self, rows: AnyArray) -> tuple[int, int]:
        return rows.size, int(self._table.computed[rows].sum()) + rows.size
