"""`rms_norm`: features scaled to a root mean square of one, times a weight."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_rows, expect_vector
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef


class RmsNorm(ArrayOp):
    """x / sqrt(mean(x^2) + eps) * w over the last axis."""

    name: ClassVar[str] = "rms_norm"
    x: Value
    w: WeightRef
    eps: float
    out: Value

    @classmethod
    def of(cls, x: Value, w: WeightRef, eps: float) -> RmsNorm:
        expect_rows(x=x)
        return cls(x, w, eps, Value(x.width, x.rows))

    def check(self) -> None:
        expect_vector(self.w, self.x.width)
        expect(self.eps > 0, f"eps is {self.eps}, it must be above 0")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame.xp.rms_norm(frame[self.x], frame.vector(self.w), self.eps)
