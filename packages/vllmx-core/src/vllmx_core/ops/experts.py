"""`experts`: a token through the MLPs that `route` chose for it."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.activation import Activation, activation, expect_activation
from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.gated_act import gated_act
from vllmx_core.ops.op import Op, expect, expect_features, expect_stack
from vllmx_core.ops.values import Value, ValueType, WeightRef
from vllmx_core.records import Record


class ExpertsSpec(Record):
    """The computation between an expert's two matrices."""

    activation: Activation | Literal["relu2"] = "silu"
    """relu2, the square of relu, is for experts without a gate."""
    gated: bool = True
    """act(gate) * up; False: act(up), and `gate_up` has the rows of up alone."""
    clamp: float | None = None
    """The limit c of a clamped SwiGLU: g = min(gate, c) and u = up within +-c make g *
    sigmoid(alpha * g) * (u + 1)."""
    alpha: float | None = 1.0
    """None: with a clamp act(g) * u."""


class Experts(Op):
    """x (T, E), ids and weights (T, k) -> (T, E): the sum over a token's k slots, in order, of
    weight * down(act(gate_up x)) by the slot's expert, in float32, rounded once. `gate_up` is a
    stack of (2F, E), gate rows first, or (F, E) where the spec has no gate; `down` is a stack of
    (E, F). With `first`, the stacks have only the experts from that number on; slots of others add
    nothing."""

    name: ClassVar[str] = "experts"
    x: Value
    ids: Value
    slot_weights: Value
    gate_up: WeightRef
    down: WeightRef
    spec: ExpertsSpec
    out: Value
    first: int | None = None
    """Set by sharding, where ranks have whole experts; None: all are here."""

    @classmethod
    def of(
        cls,
        x: Value,
        ids: Value,
        weights: Value,
        gate_up: WeightRef,
        down: WeightRef,
        spec: ExpertsSpec,
    ) -> Experts:
        expect_features(x=x)
        _expect_routed("ids", ids, "i32")
        _expect_routed("weights", weights, "f32")
        expect(isinstance(spec, ExpertsSpec), f"spec is {spec!r}, not an ExpertsSpec")
        return cls(x, ids, weights, gate_up, down, spec, Value(x.width))

    @property
    def inner(self) -> int:
        """F, the features between an expert's two matrices."""
        return self.down.cols

    def check(self) -> None:
        spec, width = self.spec, self.x.width
        if spec.activation == "relu2":
            expect(not spec.gated, "relu2 is for experts without a gate")
        else:
            expect_activation(spec.activation)
        clamped = spec.clamp is None or (spec.gated and spec.activation == "silu")
        expect(clamped, "clamp is for experts that are gated by silu")
        known = spec.alpha == 1.0 or (
            spec.clamp is not None and (spec.alpha is None or spec.alpha > 0)
        )
        expect(known, f"alpha {spec.alpha}: it is above 0, and for experts with a clamp alone")
        expect_stack(self.down, width, self.down.cols, "(features of x, F)")
        rows = self.inner * (2 if spec.gated else 1)
        expect_stack(self.gate_up, rows, width, f"({'2F' if spec.gated else 'F'}, features of x)")
        counts = f"{self.gate_up.name!r} has {self.gate_up.count} experts"
        same = self.gate_up.count == self.down.count
        expect(same, f"{counts}, {self.down.name!r} has {self.down.count}")
        routed = f"{counts}, the ids are those of {self.ids.below}"
        if self.first is None:
            expect(self.gate_up.count == self.ids.below, routed)
        else:
            end = self.first + self.gate_up.count
            expect(self.first >= 0 and end <= self.ids.below, f"{routed}, from {self.first} on")
        slots = f"ids has {self.ids.width} slots, weights has {self.slot_weights.width}"
        expect(self.ids.width == self.slot_weights.width, slots)

    def compute(self, frame: NumpyFrame) -> None:
        gate_up, down = self.gate_up, self.down
        frame[self.out] = experts(
            frame[self.x],
            frame[self.ids],
            frame[self.slot_weights],
            frame.weight(gate_up),
            frame.weight(down),
            self.spec,
            frame.bias(gate_up),
            frame.bias(down),
            self.first or 0,
        )


def _expect_routed(name: str, value: object, dtype: ValueType) -> None:
    routed = isinstance(value, Value) and value.dtype == dtype
    expect(routed, f"{name} is {value!r}, not what `route` returned")


def experts(
    x: Floats,
    ids: npt.NDArray[np.int32],
    weights: Floats,
    gate_up: Floats,
    down: Floats,
    spec: ExpertsSpec,
    gate_up_bias: Floats | None = None,
    down_bias: Floats | None = None,
    first: int = 0,
) -> Floats:
    """x (T, E), ids and weights (T, k), gate_up (X, 2F or F, E), down (X, E, F), biases (X, 2F or
    F) and (X, E) -> (T, E). The X experts are those from `first` on."""
    out = np.zeros_like(x)
    local = ids - first  # (T, k)
    for slot in range(ids.shape[1]):
        for expert in np.unique(local[:, slot]):
            if not 0 <= expert < len(down):
                continue
            rows = np.flatnonzero(local[:, slot] == expert)
            up = x[rows] @ gate_up[expert].T
            up = up if gate_up_bias is None else up + gate_up_bias[expert]
            said = activated(up, spec) @ down[expert].T
            said = said if down_bias is None else said + down_bias[expert]
            out[rows] += weights[rows, slot, None] * said
    return like(x, out)


def activated(gate_up: Array, spec: ExpertsSpec, xp: Arrays = NUMPY) -> Array:
    """(..., 2F or F) -> (..., F)."""
    if not spec.gated:
        return activation(gate_up, spec.activation, xp)
    if spec.clamp is None or spec.alpha is None:
        assert spec.activation != "relu2"
        return gated_act(gate_up, spec.activation, xp, spec.clamp)
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    return xp.fused(_clamped, spec.clamp, spec.alpha)(gate, up)


def _clamped(xp: Arrays, limit: float, alpha: float, gate: Array, up: Array) -> Array:
    """See `ExpertsSpec.clamp`."""
    g, u = xp.clip(xp.wide(gate), None, limit), xp.clip(xp.wide(up), -limit, limit)
    return xp.like(gate, g * xp.sigmoid(alpha * g) * (u + 1))
