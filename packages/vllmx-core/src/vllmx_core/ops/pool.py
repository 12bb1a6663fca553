"""`pool`: one row for each text, out of the rows of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np

from vllmx_core.ops.case import Case, Pooling, Weights
from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_features
from vllmx_core.ops.values import LogitRows, StepInputs, Value
from vllmx_core.plan import StepPlan

if TYPE_CHECKING:
    from vllmx_core.ops.case import Builder
    from vllmx_core.ops.recorder import Ops

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

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for kind in KINDS:
            yield Case.pooled(f"{kind}, width 33", 33, _alone(kind))
        yield Case.pooled("rows through a dense layer", 24, _dense, _dense_weights, 3)
        yield Case.pooled("sums, gates and norms of rows", 24, _row_wise, _row_weights)


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


def _alone(kind: PoolKind) -> Pooling:
    return lambda ops, w, x, step: ops.pool(x, step, kind)


def _dense(ops: Ops, w: Weights, x: Value, step: StepInputs) -> Value:
    x = ops.activation(ops.linear(ops.pool(x, step, "cls"), w["dense"]), "gelu")
    return ops.linear(x, w["classes"])


def _dense_weights(builder: Builder) -> None:
    builder.linear("dense", 24, 24, biases=[0]).linear("classes", 3, 24, biases=[0])


def _row_wise(ops: Ops, w: Weights, x: Value, step: StepInputs) -> Value:
    mean, last = ops.pool(x, step, "mean"), ops.pool(ops.scale(x, 0.5), step, "last")
    x = ops.layer_norm(ops.add(mean, last), w["norm"], w["bias"], 1e-5)
    x, total = ops.add_rms_norm(ops.gate(x, last, "tanh"), mean, w["norm"], 1e-6)
    x = ops.gated_act(ops.linear(ops.scale(x, w["bias"]), w["gate_up"]), "silu")
    return ops.rms_norm(ops.add(x, total), w["norm"], 1e-6)


def _row_weights(builder: Builder) -> None:
    builder.vector("norm", 24).vector("bias", 24, centre=0.5)
    builder.linear("gate_up", (24, 24), 24)
