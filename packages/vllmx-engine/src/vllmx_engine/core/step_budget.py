"""One step's budget: prompt tokens next to its decodes, and the share of lower priorities."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
from vllmx_core.plan import AnyArray

from vllmx_engine.core.cost import StepCost, StepLoad
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Sequence


class Chunk(NamedTuple):
    """A part of a prompt (or of a preempted sequence) that a step computes."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    """The last this many of its tokens are logit rows."""
    samples: bool
    """The last logit row is drawn from: the chunk ends with the last known token."""

    @property
    def num_new(self) -> int:
        """The number of its tokens without those charged on admission or computed before a
        preemption: a client does not pay twice for tokens that it lost to others."""
        charged = self.sequence.num_charged
        if charged <= self.start:
            return self.num_tokens
        return max(0, self.start + self.num_tokens - charged)


_HOLDS_ON_S = 1.0
"""Seconds of steps in which lower priorities still give way to a better one that has left."""


class PriorityShare:
    """Rows of lower priority than the best that is there get a share of its steps: as many of them
    as that holds, in turn, and chunks of their prompts with the time that they leave. A step takes
    so much longer than it would without them, however many of them there are.

    The share lasts for a while after the best has left. Clients with short answers are mostly not
    there when a step begins, and waits for the step that it meets.

    Attributes:
        rank: the best priority that decodes; None if no row is held back.
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
        """True if all decoding rows have a lower priority than this."""
        return self.rank is not None and rank < self.rank

    def holds_back(self, rank: int) -> bool:
        """True if this priority gives way to a better one."""
        return self._front is not None and rank > self._front

    def _load(self, rows: AnyArray) -> tuple[int, int]:
        return rows.size, int(self._table.computed[rows].sum()) + rows.size


class StepBudget:
    """Tokens, logit rows and seconds that are left of one step.

    Args:
        priority_share: whose decodes of the step prompts of lower priority must not hold up.
        decodes: how many rows decode, and the tokens that they attend to.
        least_chunk: of a prompt that is not the first of the step; shorter ones wait.
        num_prompts: how many could be computed now, counted in lengths of the longest; asked for
            once, when the first prompt comes.
    """

    def __init__(
        self,
        limits: Limits,
        cost: StepCost,
        priority_share: PriorityShare,
        decodes: tuple[int, int],
        least_chunk: int,
        num_prompts: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._cost = cost
        self._priority_share = priority_share
        self._decodes = decodes
        self._least_chunk = least_chunk
        self._num_prompts = num_prompts
        self._tokens = limits.token_budget - decodes[0]
        self._logits = limits.max_logit_rows - decodes[0]
        self._seconds: float | None = None
        """None before the first prompt."""
        self._image_seconds: tuple[float, float] | None = None
        """Seconds that tower passes, or else chunks of prompts with images, may add to the step;
        None before the first of them."""
        self._image_share = 1.0
        """The share that is left of it."""
        self._is_urgent = False
        """The step has a prompt that outranks all decoding rows and ignores their pace."""
        self._is_held_back = False
        """The current prompt has a lower priority than the decoding rows."""
        self._has_chunks = False

    @property
    def is_spent(self) -> bool:
        """Nothing is left for a further prompt."""
        return not self._tokens or not self._logits

    @property
    def tower_seconds(self) -> float:
        """The seconds that tower passes may add to the step for the current prompt."""
        return self._left(self._of_images[0])

    def take_tower(self, seconds: float) -> None:
        """Takes the seconds of a tower for the prompt that was looked at last."""
        assert self._seconds is not None, "fit comes first"
        self._take_image_share(seconds, self._of_images[0])
        self._seconds = max(0.0, self._seconds - seconds)
        if self._is_held_back:
            self._priority_share.seconds -= seconds

    @property
    def _of_images(self) -> tuple[float, float]:
        if self._image_seconds is None:
            cost, decodes = self._cost, self._decodes
            self._image_seconds = cost.tower_budget(*decodes), cost.image_chunk_seconds(*decodes)
        return self._image_seconds

    def _take_image_share(self, seconds: float, whole: float) -> None:
        self._image_share = max(0.0, self._image_share - seconds / whole) if whole else 0.0

    def _left(self, of_images: float = math.inf) -> float:
        """Returns the seconds that the current prompt may add, within those left for images."""
        if self._is_urgent:
            return math.inf
        assert self._seconds is not None, "fit comes first"
        seconds = self._seconds
        if of_images < math.inf:
            seconds = max(0.0, min(seconds, of_images * self._image_share))
        return min(seconds, self._priority_share.seconds) if self._is_held_back else seconds

    def fit(self, sequence: Sequence, start: int, rank: int) -> int:
        """Returns the number of a prompt's tokens from `start` on that fit into the step; 0 if the
        step is full. `rank`: the priority that was asked for."""
        if not self._admits(rank):
            return 0
        wanted = len(sequence.tokens) - start
        if self._limits.whole_prompts:
            return wanted if wanted <= self._tokens else 0
        room = self._tokens
        if not sequence.all_scored:
            room = min(room, self._logits + max(0, sequence.num_scored - start))
        size, least = min(wanted, room), sequence.least_chunk(start)
        has_images = sequence.has_images_from(start)
        seconds = self._left(self._of_images[1] if has_images else math.inf)
        if seconds < math.inf:
            affordable = self._cost.chunk_tokens(seconds, start)
            if not self._has_chunks:  # passes of a tower may leave a prompt with images no seconds
                progress = self._cost.min_chunk if has_images else self._cost.first_chunk
                affordable = max(affordable, progress)
            size = int(min(size, affordable))
        if self._has_chunks and size < min(wanted, self._least_chunk):
            return 0
        return max(size, least) if least <= room else 0

    def fit_with_tower(self, sequence: Sequence, start: int, size: int) -> int:
        """Returns how many of `size` tokens still fit after passes took their seconds for the same
        prompt; 0: they wait for the next step, since the passes were its progress."""
        seconds = self._left(self._of_images[1])
        if seconds < math.inf:
            size = int(min(size, self._cost.chunk_tokens(seconds, start)))
        return size if size >= sequence.least_chunk(start) else 0

    def _admits(self, rank: int) -> bool:
        """True if a prompt of this rank may join the step; an urgent prompt shares it with its own
        kind alone."""
        if self._priority_share.yields_to(rank):
            self._is_urgent, self._seconds = True, math.inf
        elif self._is_urgent:
            return False
        elif self._seconds is None:
            self._seconds = self._cost.chunk_seconds(*self._decodes, self._num_prompts())
        self._is_held_back = self._priority_share.holds_back(rank)
        return True

    def take(self, chunk: Chunk) -> None:
        """Takes tokens of the prompt that was looked at last."""
        self._has_chunks = True
        self._tokens -= chunk.num_tokens
        self._logits -= chunk.num_logits
        assert self._seconds is not None, "fit comes first"
        if self._seconds < math.inf or self._is_held_back:
            chunk_s = self._cost.chunk_cost(chunk.num_tokens, chunk.start)
            self._seconds -= chunk_s
            if chunk.sequence.has_images_from(chunk.start):
                self._take_image_share(chunk_s, self._of_images[1])
            if self._is_held_back:
                self._priority_share.seconds -= chunk_s
