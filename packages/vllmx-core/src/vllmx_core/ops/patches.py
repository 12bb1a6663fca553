"""`patches`: the images of a tower's pass, as rows of patches."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value
from vllmx_core.plan import PatchRows, StepPlan


class Patches(ArrayOp):
    """(T, D): the normalised pixels of each patch, `StepPlan.patches`. Every tower begins with
    it."""

    name: ClassVar[str] = "patches"
    out: Value

    @classmethod
    def of(cls, step: StepInputs, width: int) -> Patches:
        expect(isinstance(step, StepInputs), "pass on the step itself")
        return cls(Value(width))

    def check(self) -> None:
        expect(self.out.width > 0, f"patches of {self.out.width} numbers")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame.upload(patches_in(frame.plan).values)


def patches_in(plan: StepPlan) -> PatchRows:
    """Rows of patches of a tower's pass."""
    assert plan.patches is not None, "a tower is given patches"
    return plan.patches
