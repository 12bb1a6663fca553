"""`rms_norm`: features scaled to a root mean square of one, times a weight."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.op import Op, expect, expect_rows, expect_vector
from vllmx_core.ops.values import Value, WeightRef


class RmsNorm(Op):
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

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out] = rms_norm(frame[self.x], frame.weight(self.w), self.eps)


def rms_norm(x: Floats, w: Floats, eps: float) -> Floats:
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * w over the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return like(x, x / np.sqrt(mean_square + eps) * w)
