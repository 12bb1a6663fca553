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
        self._image_seconds: tuple[float, float] | None = None
        """What passes of the tower may add to the step, or else chunks of prompts with images; None
        before the first of them."""
        self._image_share = 1.0
        """The share that is left of it."""
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
        return self._left(self._of_images[0])

    def take_tower(self, seconds: float) -> None:
        """Takes the seconds of a tower for the prompt that was looked at last."""
        assert self._seconds is not None, "fit comes first"
        self._take_image_share(seconds, self._of_images[0])
        self._seconds = max(0.0, self._seconds - seconds)
        if self._is_held_back:
            self._beside.seconds -= seconds

    @property
    def _of_images(self) -> tuple[float, float]:
        if self._image_seconds is None:
            cost, decodes = self._cost, self._decodes
            self._image_seconds = cost.tower_budget(*decodes), cost.image_chunk_seconds(*decodes)
        return self._image_seconds

    def _take_image_share(self, seconds: float, whole: float) -> None:
        self._image_share = max(0.0, self._image_share - seconds / whole) if whole else 0.0

    def _left(self, of_images: float = math.inf) -> float:
        """What the prompt that was looked at last may add, at most what is left of the seconds
        that a step has for images."""
        if self._is_urgent:
            return math.inf
        assert self._seconds is not None, "fit comes first"
        seconds = self._seconds
        if of_images < math.inf:
            seconds = max(0.0, min(seconds, of_images * self._image_share))
        return min(seconds, self._beside.seconds) if self._is_held_back else seconds

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
        seconds = self._left(self._of_images[1] if sequence.has_images_from(start) else math.inf)
        if seconds < math.inf:
            affordable = self._cost.chunk_tokens(seconds, start)
            if not self._has_chunks:
                affordable = max(affordable, self._cost.min_chunk)
            size = int(min(size, affordable))
        if self._has_chunks and size < min(wanted, self._least_chunk):
            return 0
        return max(size, least) if least <= room else 0

    def fit_beside_tower(self, sequence: Sequence, start: int, size: int) -> int:
        """How many of so many tokens still go into the step once passes have taken their seconds
        for this very prompt; 0: they wait for the next, since the passes were its progress."""
        seconds = self._left(self._of_images[1])
        if seconds < math.inf:
            size = int(min(size, self._cost.chunk_tokens(seconds, start)))
        return size if size >= sequence.least_chunk(start) else 0

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
            if chunk.sequence.has_images_from(chunk.start):
                self._take_image_share(chunk_s, self._of_images[1])
            if self._is_held_back:
                self._beside.seconds -= chunk_s
