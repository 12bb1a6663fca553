"""`layer_norm`: features with mean 0 and variance 1, times a weight, plus a bias."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_rows, expect_vector
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef


class LayerNorm(ArrayOp):
    """(x - mean) / sqrt(var + eps) * w + bias over the last axis."""

    name: ClassVar[str] = "layer_norm"
    x: Value
    w: WeightRef
    bias: WeightRef | None
    eps: float
    out: Value

    @classmethod
    def of(cls, x: Value, w: WeightRef, bias: WeightRef | None, eps: float) -> LayerNorm:
        expect_rows(x=x)
        return cls(x, w, bias, eps, Value(x.width, x.rows))

    def check(self) -> None:
        expect_vector(self.w, self.x.width)
        if self.bias is not None:
            expect_vector(self.bias, self.x.width)
        expect(self.eps > 0, f"eps is {self.eps}, it must be above 0")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        w, bias = frame.vector(self.w), frame.optional(self.bias)
        frame[self.out] = frame.xp.layer_norm(frame[self.x], w, bias, self.eps)
