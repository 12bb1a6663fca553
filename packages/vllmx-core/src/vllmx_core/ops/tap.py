"""`tap`: hidden states of a step's tokens go into the feature store, for a drafter to read."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from vllmx_core.ops.op import ArrayOp, expect, expect_features
from vllmx_core.ops.values import ArrayFrame, Value


class Tap(ArrayOp):
    """Row t of x (T, E) becomes row `StepPlan.tap_rows[t]` of a part of the store, float32, where
    that is not negative."""

    name: ClassVar[str] = "tap"
    results: ClassVar[tuple[str, ...]] = ()
    x: Value
    part: int

    @classmethod
    def of(cls, x: Value, part: int) -> Tap:
        expect_features(x=x)
        return cls(x, part)

    def check(self) -> None:
        expect(self.part >= 0, f"there is no part {self.part} of features")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        rows = frame.plan.tap_rows
        if rows is None or not (rows >= 0).any():
            return
        kept = np.flatnonzero(rows >= 0)
        found = frame.xp.wide(frame[self.x])[frame.upload(kept.astype(np.int32))]
        frame.features[self.part][frame.upload(rows[kept])] = found
