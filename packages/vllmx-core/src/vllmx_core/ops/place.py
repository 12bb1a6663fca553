"""`place`: features of images take the places of tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from vllmx_core.ops.op import ArrayOp, expect, expect_features
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value


class Place(ArrayOp):
    """(T, E) -> (T, E): where `StepPlan.feature_rows` names a row of the store of features, or
    `own_rows` with `own`, that row of its part `part` replaces x, or is added to it."""

    name: ClassVar[str] = "place"
    x: Value
    part: int
    adds: bool
    own: bool
    out: Value

    @classmethod
    def of(
        cls, x: Value, step: StepInputs, part: int = 0, adds: bool = False, own: bool = False
    ) -> Place:
        expect_features(x=x)
        expect(isinstance(step, StepInputs), "pass on the step itself")
        return cls(x, part, adds, own, Value(x.width))

    def check(self) -> None:
        expect(self.part >= 0, f"there is no part {self.part} of features")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        x, plan = frame[self.x], frame.plan
        rows = plan.own_rows if self.own else plan.feature_rows
        if rows is None or not (rows >= 0).any():
            frame[self.out] = x
            return
        found = frame.features[self.part][frame.upload(np.maximum(rows, 0))]  # (T, E)
        here = frame.upload(rows >= 0)[:, None]
        frame[self.out] = frame.xp.where(here, x + found if self.adds else found, x)
