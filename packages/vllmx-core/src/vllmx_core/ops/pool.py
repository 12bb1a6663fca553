"""`pool`: one row for each text, out of the rows of its tokens."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import numpy as np

from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_features
from vllmx_core.ops.values import LogitRows, Value
from vllmx_core.plan import StepPlan

PoolKind = Literal["last", "mean", "cls"]
KINDS: tuple[PoolKind, ...] = get_args(PoolKind)


class Pool(Op):
    """(T, E) -> (L, E), summed in float32. Each of the step's logit rows is the last token of a row
    r of the step: "last" takes that token, "cls" the first one of r in this step, "mean" the mean
    of all that r has in this step. So "cls" and "mean" want the whole text in one step."""

    name: ClassVar[str] = "pool"
    x: Value
    rows: LogitRows
    kind: PoolKind
    out: Value

    @classmethod
    def of(cls, x: Value, rows: LogitRows, kind: PoolKind) -> Pool:
        expect_features(x=x)
        return cls(x, rows, kind, Value(x.width, "L"))

    def check(self) -> None:
        expect(isinstance(self.rows, LogitRows), "rows must be step.logit_rows")
        expect(self.kind in KINDS, f"unknown kind {self.kind!r}: choose {', '.join(KINDS)}")

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out] = pool(frame[self.x], frame.plan, self.kind)


def pool(x: Floats, plan: StepPlan, kind: PoolKind) -> Floats:
    """(T, E) -> (L, E)."""
    last = plan.logit_rows
    if kind == "last":
        return x[last]
    row = np.searchsorted(plan.query_start, last, side="right") - 1
    first = plan.query_start[row]
    if kind == "cls":
        return x[first]
    means = [x[begin : end + 1].mean(axis=0) for begin, end in zip(first, last, strict=True)]
    return np.stack(means) if means else x[:0]
