"""Passes of a tower among the steps: whole where they fit into one, and in parts where they would
hold up those who decode."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vllmx_core.model import ImagePlaces
from vllmx_core.plan import StepPlan
from vllmx_core.records import MutableRecord

from vllmx_engine.core.cost import StepCost, TowerLoad
from vllmx_engine.core.step_budget import StepBudget
from vllmx_engine.wire.messages import ImageInput


class Pass(MutableRecord):
    """An image on its way through the tower."""

    image: ImageInput
    places: ImagePlaces
    plan: StepPlan | None = None
    """The pass's plan, once it has begun."""
    done: float = 0.0
    """Share of its work that steps before did."""

    @property
    def load(self) -> TowerLoad:
        """What the whole image costs the tower."""
        return TowerLoad.of(math.prod(self.image.grid))


class StepTowers:
    """What a step under preparation does of passes, in this order: the one that has begun, others
    from beginning to end, together, and the first part of another.

    Args:
        begun: a pass that earlier steps did a part of. No other begins before its end.
        in_parts: whether the backend takes passes in parts; others do one that is too long for any
            step alone.
    """

    def __init__(self, cost: StepCost, begun: Pass | None, *, in_parts: bool) -> None:
        self._cost, self._in_parts = cost, in_parts
        self._is_advanced = False
        self.begun = begun
        self.begun_end = 0.0 if begun is None else begun.done
        self.whole: dict[bytes, Pass] = {}
        self.started: Pass | None = None
        self.started_end = 0.0
        self.load = TowerLoad(0.0, 0.0)
        """What all passes of the step cost by."""

    @property
    def is_busy(self) -> bool:
        """A pass will not have ended with this step."""
        return self.started is not None or (self.begun is not None and self.begun_end < 1.0)

    def work_for(self, images: Iterable[ImageInput]) -> bool:
        """Whether the step does a part of a pass for any of these."""
        digests = {*self.whole}
        digests |= {one.image.digest for one in (self.begun, self.started) if one is not None}
        return not digests.isdisjoint(image.digest for image in images)

    def advance(self, budget: StepBudget) -> None:
        """The pass that has begun goes on, once a step."""
        if self.begun is None or self._is_advanced:
            return
        self._is_advanced = True
        share = self._cost.tower_share(budget.tower_seconds, self.begun.load)
        self.begun_end = min(1.0, self.begun.done + share)
        self._take(self.begun.load.part(self.begun_end - self.begun.done), budget)

    def finishes(self, wanted: Pass, budget: StepBudget) -> bool:
        """Whether a pass that is wanted has ended with this step; if not it begins if it can."""
        digest = wanted.image.digest
        if digest in self.whole:
            return True
        if self.is_busy:
            return False
        if self.begun is not None and self.begun.image.digest == digest:
            return True
        seconds = budget.tower_seconds
        share = self._cost.tower_share(seconds, wanted.load)
        if self.load.patches and seconds < math.inf and not self._cost.knows_towers:
            return False  # what it adds cannot be told
        if share < 1.0 and self._in_parts:
            if seconds > 0.0 or not self.load.patches:
                self.started, self.started_end = wanted, share
                self._take(wanted.load.part(share), budget)
            return False
        if share < 1.0 and self.load.patches:
            return False
        self.whole[digest] = wanted
        self._take(wanted.load, budget)
        return True

    def _take(self, load: TowerLoad, budget: StepBudget) -> None:
        self.load = self.load + load
        budget.take_tower(self._cost.tower_seconds(load))
