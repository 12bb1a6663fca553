"""`gated_act`: one half of the features, activated, times the other half."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.ops.activation import Activation, activation, expect_activation
from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_rows
from vllmx_core.ops.values import Value


class GatedAct(Op):
    """gate_up (T, 2F), the gate first -> act(gate) * up (T, F)."""

    name: ClassVar[str] = "gated_act"
    gate_up: Value
    kind: Activation
    out: Value

    @classmethod
    def of(cls, gate_up: Value, kind: Activation) -> GatedAct:
        expect_rows(gate_up=gate_up)
        return cls(gate_up, kind, Value(gate_up.width // 2, gate_up.rows))

    def check(self) -> None:
        expect_activation(self.kind)
        width = self.gate_up.width
        expect(width % 2 == 0, f"gate_up has {width} features: gate and up must be as many")

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out] = gated_act(frame[self.gate_up], self.kind)


def gated_act(gate_up: Floats, kind: Activation) -> Floats:
    """(T, 2F), the gate first -> (T, F)."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return activation(gate, kind) * up
