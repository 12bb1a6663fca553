"""`mix`: for each patch a few weighted rows of a table, such as interpolated positions."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_weight
from vllmx_core.ops.patches import patches_in
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value, WeightRef


class Mix(ArrayOp):
    """(T, E): row t is the sum of the table's rows `PatchRows.table_rows[t]`, each times its number
    in `PatchRows.table_weights[t]`."""

    name: ClassVar[str] = "mix"
    w: WeightRef
    out: Value

    @classmethod
    def of(cls, step: StepInputs, w: WeightRef) -> Mix:
        expect(isinstance(step, StepInputs), "pass on the step itself")
        op = cls(w, Value(w.cols))
        op.check()
        return op

    def check(self) -> None:
        expect_weight(self.w, "constant" if self.w.kind == "constant" else "embedding")
        expect(self.w.cols > 0, f"{self.w.name!r} is no table")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        rows = patches_in(frame.plan)
        ids, weights = frame.upload(rows.table_rows), frame.upload(rows.table_weights)  # (T, k)
        taps = range(rows.table_rows.shape[1])  # one by one: (T, k, E) would be large
        frame[self.out] = sum(
            frame.rows(self.w, ids[:, tap]) * weights[:, tap, None] for tap in taps
        )
