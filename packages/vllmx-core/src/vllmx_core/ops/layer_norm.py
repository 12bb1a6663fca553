"""`layer_norm`: features with mean 0 and variance 1, times a weight, plus a bias."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.op import Op, expect, expect_rows, expect_vector
from vllmx_core.ops.values import Value, WeightRef


class LayerNorm(Op):
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

    def compute(self, frame: NumpyFrame) -> None:
        bias = None if self.bias is None else frame.weight(self.bias)
        frame[self.out] = layer_norm(frame[self.x], frame.weight(self.w), bias, self.eps)


def layer_norm(x: Floats, w: Floats, bias: Floats | None, eps: float) -> Floats:
    """(x - mean) / sqrt(var + eps) * w + bias over the last axis."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    scaled = centred / np.sqrt(variance + eps) * w
    return like(x, scaled if bias is None else scaled + bias)
