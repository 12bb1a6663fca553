"""What work of lower priority may add to a step in which rows of a higher one decode."""

from __future__ import annotations

import math

import numpy as np
from vllmx_core.plan import AnyArray

from vllmx_engine.core.cost import StepCost
from vllmx_engine.core.rows import RowTable


class Beside:
    """Rows of lower priority than the best that decodes get a share of its steps: as many of them
    as that holds, in turn, and chunks of their prompts with the time that they leave. A step takes
    so much longer than it would without them, however many of them there are.

    Attributes:
        rank: the best priority that decodes; None where nobody is held back.
        seconds: what chunks of lower priority may add to the step that is being made.
    """

    def __init__(self, table: RowTable, cost: StepCost) -> None:
        self._table = table
        self._cost = cost
        self._next = 0
        """The row whose turn it is."""
        self.rank: int | None = None
        self.seconds = math.inf

    def choose(self, rows: AnyArray, *, several: bool, has_prompts: bool) -> AnyArray:
        """The rows, among these, that decode in the next step.

        Args:
            several: there is more than one priority.
            has_prompts: some wait for chunks, for which half of the share is kept.
        """
        self.rank, self.seconds = None, math.inf
        if not several or not rows.size:
            return rows
        ranks = self._table.rank[rows]
        self.rank = int(ranks.min())
        best, lower = rows[ranks == self.rank], rows[ranks != self.rank]
        self.seconds = self._cost.share_seconds(*self._load(best))
        if not lower.size:
            return rows
        affordable_s = self.seconds / 2 if has_prompts else self.seconds
        each_s = self._cost.decode_seconds(*self._load(lower)) / lower.size
        if each_s * lower.size > affordable_s:
            count = max(1, int(affordable_s / each_s))
            lower = np.roll(lower, -int(np.searchsorted(lower, self._next)))[:count]
            self._next = int(lower[-1]) + 1
            rows = np.sort(np.concatenate([best, lower]))
        self.seconds = max(0.0, self.seconds - each_s * lower.size)
        return rows

    def yields_to(self, rank: int) -> bool:
        """Whether all that decodes has a lower priority than this."""
        return self.rank is not None and rank < self.rank

    def holds_back(self, rank: int) -> bool:
        """Whether this priority is lower than that of rows that decode."""
        return self.rank is not None and rank > self.rank

    def _load(self, rows: AnyArray) -> tuple[int, int]:
        return rows.size, int(self._table.computed[rows].sum()) + rows.size
