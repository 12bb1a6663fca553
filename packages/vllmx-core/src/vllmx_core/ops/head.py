"""`logits`: the LM head, over the rows of the step that want logits."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.linear import linear
from vllmx_core.ops.op import Op, expect, expect_features, expect_matrix, expect_weight
from vllmx_core.ops.values import LogitRows, Value, WeightRef
from vllmx_core.plan import I32


class Head(Op):
    """Gathers `rows` of x, multiplies by the LM head: (L, V) float32; with a softcap c, each logit
    becomes c * tanh(logit / c)."""

    name: ClassVar[str] = "logits"
    x: Value
    rows: LogitRows
    w: WeightRef
    softcap: float | None
    out: Value

    @classmethod
    def of(cls, x: Value, rows: LogitRows, w: WeightRef, softcap: float | None = None) -> Head:
        expect_features(x=x)
        expect_weight(w, "linear")
        return cls(x, rows, w, softcap or None, Value(w.rows, "L", "f32"))

    def check(self) -> None:
        expect(isinstance(self.rows, LogitRows), "rows must be step.logit_rows")
        expect_matrix(self.x, self.w)
        cap = self.softcap
        expect(cap is None or cap > 0, f"the softcap is {cap}, it must be above 0")

    def compute(self, frame: NumpyFrame) -> None:
        w, bias, rows = frame.weight(self.w), frame.bias(self.w), frame.plan.logit_rows
        frame[self.out] = logits(frame[self.x], rows, w, bias, self.softcap)


def softcap(x: Array, cap: float | None, xp: Arrays = NUMPY) -> Array:
    """cap * tanh(x / cap); x itself when cap is None."""
    return x if cap is None else cap * xp.tanh(x / cap)


def logits(x: Floats, rows: I32, w: Floats, bias: Floats | None, cap: float | None) -> Array:
    """(T, E), (L,), (V, E), (V,) -> (L, V)."""
    return softcap(linear(x[rows], w, bias), cap)
