"""`pool`: one row for each text, out of the rows of its tokens."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import numpy as np

from vllmx_core.ops.op import ArrayOp, expect, expect_features
from vllmx_core.ops.values import ArrayFrame, LogitRows, Value

PoolKind = Literal["last", "mean", "cls", "max"]
KINDS: tuple[PoolKind, ...] = get_args(PoolKind)


class Pool(ArrayOp):
    """(T, E) -> (L, E), summed in float32. Each of the step's logit rows is the last token of a row
    r of the step: "last" takes that token, "cls" the first one of r in this step, "mean" the mean
    of all that r has in this step, "max" their maximum. All but "last" want the whole text in one
    step."""

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

    def compute(self, frame: ArrayFrame[Any]) -> None:
        x, plan, xp = frame.xp.wide(frame[self.x]), frame.plan, frame.xp
        last = plan.logit_rows
        if self.kind == "last":
            frame[self.out] = x[frame.upload(last)]
            return
        row = np.searchsorted(plan.query_start, last, side="right") - 1
        first = plan.query_start[row]
        if self.kind == "cls":
            frame[self.out] = x[frame.upload(first)]
            return
        texts = zip(first.tolist(), last.tolist(), strict=True)
        rows = [x[begin : end + 1] for begin, end in texts]
        if self.kind == "max":
            found = [xp.max(each, axis=0, keepdims=True)[0] for each in rows]
        else:
            found = [each.mean(axis=0) for each in rows]
        frame[self.out] = xp.stack(found) if found else x[:0]
