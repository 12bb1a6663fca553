"""`linear`: a matrix product with an optional bias."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.ops.activation import Activation, activation
from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.op import Op, expect_matrix, expect_rows, expect_weight
from vllmx_core.ops.values import Value, WeightRef


class Linear(Op):
    """act(x @ w.T + bias); the bias comes with the weight."""

    name: ClassVar[str] = "linear"
    x: Value
    w: WeightRef
    out: Value
    activation: Activation | None = None
    """Set by `passes.fuse_activations`; models write a separate op."""

    @classmethod
    def of(cls, x: Value, w: WeightRef) -> Linear:
        expect_rows(x=x)
        expect_weight(w, "linear")
        return cls(x, w, Value(w.rows, x.rows))

    def check(self) -> None:
        expect_matrix(self.x, self.w)

    def compute(self, frame: NumpyFrame) -> None:
        y = linear(frame[self.x], frame.weight(self.w), frame.bias(self.w))
        frame[self.out] = y if self.activation is None else activation(y, self.activation)


def linear(x: Floats, w: Floats, bias: Floats | None = None) -> Floats:
    """(T, in), (out, in), (out,) -> (T, out)."""
    product = x @ w.T
    return like(x, product if bias is None else product + bias)
