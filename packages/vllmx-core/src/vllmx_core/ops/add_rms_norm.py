"""`add_rms_norm`: a residual sum and its norm."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.add import Add
from vllmx_core.ops.op import ArrayOp, Op, expect, expect_rows, expect_same_width, expect_vector
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef


class AddRmsNorm(ArrayOp):
    """total = x + residual, out = rms_norm(total)."""

    name: ClassVar[str] = "add_rms_norm"
    results: ClassVar[tuple[str, ...]] = ("out", "total")
    x: Value
    residual: Value
    w: WeightRef
    eps: float
    out: Value
    total: Value

    @classmethod
    def of(cls, x: Value, residual: Value, w: WeightRef, eps: float) -> AddRmsNorm:
        expect_rows(x=x, residual=residual)
        normed, total = Value(x.width, x.rows), Value(x.width, x.rows)
        return cls(x, residual, w, eps, normed, total)

    def check(self) -> None:
        expect_same_width(x=self.x, residual=self.residual)
        expect_vector(self.w, self.x.width)
        expect(self.eps > 0, f"eps is {self.eps}, it must be above 0")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        total = frame[self.x] + frame[self.residual]
        frame[self.out] = frame.xp.rms_norm(total, frame.vector(self.w), self.eps)
        frame[self.total] = total

    def expand(self) -> tuple[Op, ...]:
        return (
            Add(self.x, self.residual, self.total),
            RmsNorm(self.total, self.w, self.eps, self.out),
        )
