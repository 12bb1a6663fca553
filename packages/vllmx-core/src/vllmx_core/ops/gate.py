"""`gate`: features times a gate, one for each feature, for each head or for the whole token."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.activation import Activation, gated
from vllmx_core.ops.op import ArrayOp, expect, expect_rows
from vllmx_core.ops.values import ArrayFrame, Value

GateKind = Activation | Literal["sigmoid", "identity", "tanh", "relu2"]
"""relu2 is the square of relu."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
KINDS: tuple[GateKind, ...] = (*ACTIVATIONS, "sigmoid", "identity", "tanh", "relu2")


class Gate(ArrayOp):
    """x (T, F) times act(g), g (T, G) with G a divisor of F: each gate is for F / G neighbouring
    features, such as those of a head. The weights of `route` may be gates, too."""

    name: ClassVar[str] = "gate"
    x: Value
    g: Value
    kind: GateKind
    out: Value

    @classmethod
    def of(cls, x: Value, g: Value, kind: GateKind) -> Gate:
        expect_rows(x=x)
        routed = isinstance(g, Value) and (g.rows, g.dtype) == ("T", "f32")
        if not routed:
            expect_rows(x=x, g=g)
        return cls(x, g, kind, Value(x.width, x.rows))

    @property
    def span(self) -> int:
        """Neighbouring features that share a gate."""
        return self.x.width // self.g.width

    def check(self) -> None:
        expect(self.kind in KINDS, f"unknown gate {self.kind!r}: choose {', '.join(KINDS)}")
        divides = self.g.width > 0 and self.x.width % self.g.width == 0
        expect(divides, f"g has {self.g.width} features, which do not divide x's {self.x.width}")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = gate(frame[self.x], frame[self.g], self.kind, frame.xp)


def gate(x: Array, g: Array, kind: GateKind, xp: Arrays = NUMPY) -> Array:
    """(T, F), (T, G) -> (T, F)."""
    runs = x.reshape(*g.shape, x.shape[-1] // g.shape[-1])
    return gated(runs, g[..., None], kind, xp).reshape(x.shape)
