"""`cross_attention`: tokens attend to the features of their sequence, which a tower left."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_features
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value
from vllmx_core.records import Record


class CrossSpec(Record):
    """The options of one layer. H = num_heads, D = head_size."""

    num_heads: int
    head_size: int
    scale: float
    keys: int
    """The part of the feature store that holds its keys, (rows, H * D)."""
    values: int
    """The part that holds its values."""


class CrossAttention(ArrayOp):
    """q (T, H * D) -> (T, H * D): each token attends to the rows of the feature store that
    `StepPlan.cross_rows` names for its sequence, to all of them alike. Zeros where it names
    none."""

    name: ClassVar[str] = "cross_attention"
    q: Value
    spec: CrossSpec
    out: Value

    @classmethod
    def of(cls, q: Value, spec: CrossSpec, step: StepInputs) -> CrossAttention:
        expect_features(q=q)
        expect(isinstance(step, StepInputs), "pass on the step itself")
        return cls(q, spec, Value(q.width))

    def check(self) -> None:
        spec = self.spec
        width = spec.num_heads * spec.head_size
        expect(
            self.q.width == width,
            f"q has {self.q.width} features, not {spec.num_heads} * {spec.head_size} = {width}",
        )
        expect(min(spec.keys, spec.values) >= 0, "features have no parts below 0")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        plan, spec, xp = frame.plan, self.spec, frame.xp
        x = frame[self.q]
        if plan.cross_rows is None:
            frame[self.out] = x * 0
            return
        starts, found = plan.query_start.tolist(), []
        for row, (first, count) in enumerate(plan.cross_rows.tolist()):
            q = x[starts[row] : starts[row + 1]]  # (Q, H * D)
            if not count:
                found.append(q * 0)
                continue
            shape = (-1, spec.num_heads, spec.head_size)
            keys, values = (
                frame.features[part][first : first + count].reshape(shape).swapaxes(0, 1)
                for part in (spec.keys, spec.values)
            )  # (H, C, D)
            scores = xp.wide(q).reshape(shape).swapaxes(0, 1) @ keys.swapaxes(1, 2) * spec.scale
            out = (xp.softmax(scores) @ values).swapaxes(0, 1)
            found.append(xp.like(q, out.reshape(q.shape)))
        frame[self.out] = xp.concatenate(found, axis=0)
