"""`activation`: a function of each feature."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import numpy as np

from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.op import Op, expect, expect_rows
from vllmx_core.ops.values import Value

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
KINDS: tuple[Activation, ...] = get_args(Activation)
ActKind = Activation | Literal["tanh"]
"""Kinds that the op has; experts and gated layers have those of `Activation`."""
ACT_KINDS: tuple[ActKind, ...] = (*KINDS, "tanh")

_erf = np.vectorize(math.erf, otypes=[np.float64])


def expect_activation(kind: object) -> None:
    """`kind` must be an `Activation`."""
    expect(kind in KINDS, f"unknown activation {kind!r}: choose {', '.join(KINDS)}")


class Act(Op):
    """act(x)."""

    name: ClassVar[str] = "activation"
    x: Value
    kind: ActKind
    out: Value

    @classmethod
    def of(cls, x: Value, kind: ActKind) -> Act:
        expect_rows(x=x)
        return cls(x, kind, Value(x.width, x.rows))

    def check(self) -> None:
        known = f"choose {', '.join(ACT_KINDS)}"
        expect(self.kind in ACT_KINDS, f"unknown activation {self.kind!r}: {known}")

    def compute(self, frame: NumpyFrame) -> None:
        x = frame[self.x]
        frame[self.out] = np.tanh(x) if self.kind == "tanh" else activation(x, self.kind)


def activation(x: Floats, kind: Activation) -> Floats:
    """silu, gelu (exact, by erf), gelu_tanh or relu."""
    if kind == "silu":
        with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
            return like(x, x / (1 + np.exp(-x)))
    if kind == "gelu":
        return like(x, 0.5 * x * (1 + _erf(x / math.sqrt(2))))
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return like(x, 0.5 * x * (1 + np.tanh(inner)))
    if kind == "relu":
        return np.maximum(x, 0)
    raise ValueError(f"unknown activation {kind!r}")
