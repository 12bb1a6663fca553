"""`gated_act`: one half of the features, activated, times the other half."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.activation import Activation, expect_activation, gated
from vllmx_core.ops.op import ArrayOp, expect, expect_rows
from vllmx_core.ops.values import ArrayFrame, Value


class GatedAct(ArrayOp):
    """gate_up (T, 2F), the gate first -> act(gate) * up (T, F). With a limit the gate is at most
    that, and up is held within +-limit."""

    name: ClassVar[str] = "gated_act"
    gate_up: Value
    kind: Activation
    out: Value
    limit: float | None = None

    @classmethod
    def of(cls, gate_up: Value, kind: Activation, limit: float | None = None) -> GatedAct:
        expect_rows(gate_up=gate_up)
        return cls(gate_up, kind, Value(gate_up.width // 2, gate_up.rows), limit)

    def check(self) -> None:
        expect_activation(self.kind)
        width = self.gate_up.width
        expect(width % 2 == 0, f"gate_up has {width} features: gate and up must be as many")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = gated_act(frame[self.gate_up], self.kind, frame.xp, self.limit)


def gated_act(
    gate_up: Array, kind: Activation, xp: Arrays = NUMPY, limit: float | None = None
) -> Array:
    """(T, 2F), the gate first -> (T, F)."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    if limit is not None:
        gate, up = xp.clip(gate, None, limit), xp.clip(up, -limit, limit)
    return gated(up, gate, kind, xp)
