"""`place`: features of images take the places of tokens."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_features
from vllmx_core.ops.values import StepInputs, Value


class Place(Op):
    """(T, E) -> (T, E): where `StepPlan.feature_rows` names a row of the store of features, that
    row of its part `part` replaces x, or is added to it."""

    name: ClassVar[str] = "place"
    x: Value
    part: int
    adds: bool
    out: Value

    @classmethod
    def of(cls, x: Value, step: StepInputs, part: int, adds: bool) -> Place:
        expect_features(x=x)
        expect(isinstance(step, StepInputs), "pass on the step itself")
        return cls(x, part, adds, Value(x.width))

    def check(self) -> None:
        expect(self.part >= 0, f"there is no part {self.part} of features")

    def compute(self, frame: NumpyFrame) -> None:
        x, rows = frame[self.x], frame.plan.feature_rows
        if rows is None or not (rows >= 0).any():
            frame[self.out] = x
            return
        out, here = x.copy(), rows >= 0  # (T, E), (T,)
        found = frame.features[self.part][rows[here]]
        out[here] = out[here] + found if self.adds else found
        frame[self.out] = out
