"""What one step has room for beside its decodes: how much of a prompt it computes."""

from __future__ import annotations

import math
from collections.abc import Callable

from vllmx_engine.core.beside import Beside
from vllmx_engine.core.chunk import Chunk
from vllmx_engine.core.cost import StepCost
from vllmx_engine.core.sequence import Limits, Sequence


class StepBudget:
    """Tokens, logit rows and seconds that are left of one step.

    Args:
        beside: whose decodes of the step prompts of lower priority must not hold up.
        decodes: how many rows decode, and the tokens that they attend to.
        least_chunk: of a prompt that is not the first of the step; shorter ones wait.
        num_prompts: how many could be computed now; asked for once, when the first prompt comes.
    """

    def __init__(
        self,
        limits: Limits,
        cost: StepCost,
        beside: Beside,
        decodes: tuple[int, int],
        least_chunk: int,
        num_prompts: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._cost = cost
        self._beside = beside
        self._decodes = decodes
        self._least_chunk = least_chunk
        self._num_prompts = num_prompts
        self._tokens = limits.token_budget - decodes[0]
        self._logits = limits.max_logit_rows - decodes[0]
        self._seconds: float | None = None
        """None before the first prompt."""
        self._tower_seconds: float | None = None
        """None before the first pass."""
        self._is_urgent = False
        """The step has a prompt for which the pace of who decodes counts for nothing."""
        self._is_held_back = False
        """The prompt that was looked at last has a lower priority than who decodes."""
        self._has_chunks = False

    @property
    def is_spent(self) -> bool:
        """Nothing is left for a further prompt."""
        return not self._tokens or not self._logits

    @property
    def tower_seconds(self) -> float:
        """What passes of the tower may add to the step for the prompt that was looked at last."""
        if self._is_urgent:
            return math.inf
        assert self._seconds is not None, "fit comes first"
        if self._tower_seconds is None:
            self._tower_seconds = self._cost.tower_budget(*self._decodes)
        seconds = max(0.0, min(self._seconds, self._tower_seconds))
        return min(seconds, self._beside.seconds) if self._is_held_back else seconds

    def take_tower(self, seconds: float) -> None:
        """Takes the seconds of a tower for the prompt that was looked at last."""
        assert self._seconds is not None, "fit comes first"
        if self._tower_seconds is not None:
            self._tower_seconds -= seconds
        self._seconds = max(0.0, self._seconds - seconds)
        if self._is_held_back:
            self._beside.seconds -= seconds

    def fit(self, sequence: Sequence, start: int, rank: int) -> int:
        """How many tokens of a prompt, from `start` on, go into the step; 0 when the step is full.
        `rank`: the priority that was asked for."""
        if not self._admits(rank):
            return 0
        wanted = len(sequence.tokens) - start
        if self._limits.whole_prompts:
            return wanted if wanted <= self._tokens else 0
        room = self._tokens
        if not sequence.all_scored:
            room = min(room, self._logits + max(0, sequence.num_scored - start))
        size, least = min(wanted, room), sequence.least_chunk(start)
        seconds = self._seconds or 0.0
        if self._is_held_back:
            seconds = min(seconds, self._beside.seconds)
        if seconds < math.inf:
            affordable = self._cost.chunk_tokens(seconds, start)
            if not self._has_chunks:
                affordable = max(affordable, self._cost.min_chunk)
            size = int(min(size, affordable))
        if self._has_chunks and size < min(wanted, self._least_chunk):
            return 0
        return max(size, least) if least <= room else 0

    def _admits(self, rank: int) -> bool:
        """Whether a prompt of this rank may come in; beside an urgent one there is room for others
        of its kind alone."""
        if self._beside.yields_to(rank):
            self._is_urgent, self._seconds = True, math.inf
        elif self._is_urgent:
            return False
        elif self._seconds is None:
            self._seconds = self._cost.chunk_seconds(*self._decodes, self._num_prompts())
        self._is_held_back = self._beside.holds_back(rank)
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
            if self._is_held_back:
                self._beside.seconds -= chunk_s
