"""`gated_linear`: a product whose gated activation is taken at once. A pass makes it, no model."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.ops.activation import Activation, expect_activation
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.gated_act import GatedAct, gated_act
from vllmx_core.ops.linear import Linear, linear
from vllmx_core.ops.op import Op, expect, expect_matrix
from vllmx_core.ops.values import Value, WeightRef


class GatedLinear(Op):
    """gated_act(linear(x, w)) without the (T, 2F) in between; see `vllmx_core.recorded.passes`."""

    name: ClassVar[str] = "gated_linear"
    x: Value
    w: WeightRef
    kind: Activation
    out: Value

    def check(self) -> None:
        expect_matrix(self.x, self.w)
        expect_activation(self.kind)
        twice = f"{self.w.name!r} has {self.w.rows} rows, twice {self.out.width} are wanted"
        expect(self.w.rows == 2 * self.out.width, twice)

    def compute(self, frame: NumpyFrame) -> None:
        gate_up = linear(frame[self.x], frame.weight(self.w), frame.bias(self.w))
        frame[self.out] = gated_act(gate_up, self.kind)

    def expand(self) -> tuple[Op, ...]:
        gate_up = Value(self.w.rows, self.x.rows)
        return Linear(self.x, self.w, gate_up), GatedAct(gate_up, self.kind, self.out)
