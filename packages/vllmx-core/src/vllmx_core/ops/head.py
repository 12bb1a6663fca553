"""`logits`: the LM head, over the rows of the step that want logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from vllmx_core.ops.case import Case, Weights
from vllmx_core.ops.formulas import Floats, NumpyFrame, like
from vllmx_core.ops.linear import linear
from vllmx_core.ops.op import Op, expect, expect_features, expect_matrix, expect_weight
from vllmx_core.ops.values import LogitRows, StepInputs, Value, WeightRef
from vllmx_core.plan import I32

if TYPE_CHECKING:
    from vllmx_core.ops.case import Builder
    from vllmx_core.ops.recorder import Ops


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
    def of(cls, x: Value, rows: LogitRows, w: WeightRef, softcap: float | None) -> Head:
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

    @classmethod
    def cases(cls) -> Iterator[Case]:
        return (_case(softcap, tied) for softcap in (None, 2.5) for tied in (False, True))


def _case(softcap: float | None, tied: bool) -> Case:
    def build(builder: Builder) -> None:
        builder.embedding("embed", 24)
        if tied:
            builder.tied("head", "embed", 24)
        else:
            builder.linear("head", builder.vocab_size, 24, biases=[0])

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        x = ops.embedding(step.tokens, w["embed"])
        return ops.logits(x, step.logit_rows, w["head"], softcap)

    return Case(f"softcap {softcap}, {'tied' if tied else 'biased'}", build, body)


def softcap(x: Floats, cap: float | None) -> Floats:
    """cap * tanh(x / cap); x itself when cap is None."""
    return x if cap is None else like(x, cap * np.tanh(x / cap))


def logits(x: Floats, rows: I32, w: Floats, bias: Floats | None, cap: float | None) -> Floats:
    """(T, E), (L,), (V, E), (V,) -> (L, V)."""
    return softcap(linear(x[rows], w, bias), cap)
