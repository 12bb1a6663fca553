"""`add_rms_norm`: a residual sum and its norm."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.ops.add import Add
from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_rows, expect_same_width, expect_vector
from vllmx_core.ops.rms_norm import RmsNorm, rms_norm
from vllmx_core.ops.values import Value, WeightRef


class AddRmsNorm(Op):
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

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out], frame[self.total] = add_rms_norm(
            frame[self.x], frame[self.residual], frame.weight(self.w), self.eps
        )

    def expand(self) -> tuple[Op, ...]:
        return (
            Add(self.x, self.residual, self.total),
            RmsNorm(self.total, self.w, self.eps, self.out),
        )


def add_rms_norm(
    x: Floats, residual: Floats | None, w: Floats, eps: float
) -> tuple[Floats, Floats]:
    """(normalised sum, sum); the sum of x alone is x itself."""
    total = x if residual is None else x + residual
    return rms_norm(total, w, eps), total
