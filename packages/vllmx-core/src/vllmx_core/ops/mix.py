"""`mix`: for each patch a few weighted rows of a table, such as interpolated positions."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.ops.formulas import NumpyFrame, like
from vllmx_core.ops.op import Op, expect, expect_weight
from vllmx_core.ops.patches import patches_in
from vllmx_core.ops.values import StepInputs, Value, WeightRef


class Mix(Op):
    """(T, E): row t is the sum of the table's rows `PatchRows.table_rows[t]`, each times its number
    in `PatchRows.table_weights[t]`."""

    name: ClassVar[str] = "mix"
    w: WeightRef
    out: Value

    @classmethod
    def of(cls, step: StepInputs, w: WeightRef) -> Mix:
        expect(isinstance(step, StepInputs), "pass on the step itself")
        expect_weight(w, "embedding")
        return cls(w, Value(w.cols))

    def check(self) -> None:
        expect_weight(self.w, "embedding")

    def compute(self, frame: NumpyFrame) -> None:
        rows = patches_in(frame.plan)
        taps = frame.weight(self.w)[rows.table_rows]  # (T, k, E)
        frame[self.out] = like(taps, np.einsum("tke,tk->te", taps, rows.table_weights))
