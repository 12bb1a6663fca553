"""`activation`: a function of each feature."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_rows
from vllmx_core.ops.values import ArrayFrame, Value

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
KINDS: tuple[Activation, ...] = get_args(Activation)
ActKind = Activation | Literal["tanh"]
"""Kinds that the op has; experts and gated layers have those of `Activation`."""
ACT_KINDS: tuple[ActKind, ...] = (*KINDS, "tanh")


def expect_activation(kind: object) -> None:
    """`kind` must be an `Activation`."""
    expect(kind in KINDS, f"unknown activation {kind!r}: choose {', '.join(KINDS)}")


class Act(ArrayOp):
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

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = activation(frame[self.x], self.kind, frame.xp)


def activation(x: Array, kind: str, xp: Arrays = NUMPY) -> Array:
    """The function of this name, computed wide and rounded once."""
    return xp.fused(_activated, kind)(x)


def gated(x: Array, g: Array, kind: str, xp: Arrays = NUMPY) -> Array:
    """x * act(g), for shapes that broadcast."""
    return xp.fused(_gated, kind)(x, g)


def _activated(xp: Arrays, kind: str, x: Array) -> Array:
    return xp.like(x, xp.activation(kind)(xp.wide(x)))


def _gated(xp: Arrays, kind: str, x: Array, g: Array) -> Array:
    return xp.like(x, x * xp.activation(kind)(xp.wide(g)))
