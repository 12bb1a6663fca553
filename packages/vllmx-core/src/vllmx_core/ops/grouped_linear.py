"""`grouped_linear`: a matrix for each of G equal groups of features."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.ops.formulas import NumpyFrame, like
from vllmx_core.ops.op import Op, expect, expect_features, expect_stack
from vllmx_core.ops.values import Value, WeightRef


class GroupedLinear(Op):
    """x (T, G * C), a stack of G matrices (R, C) -> (T, G * R): the matrices' results side by
    side."""

    name: ClassVar[str] = "grouped_linear"
    x: Value
    w: WeightRef
    out: Value

    @classmethod
    def of(cls, x: Value, w: WeightRef) -> GroupedLinear:
        expect_features(x=x)
        return cls(x, w, Value(w.count * w.rows))

    def check(self) -> None:
        groups = f"x has {self.x.width} features, in {self.w.count} groups"
        expect(self.x.width % self.w.count == 0, groups)
        expect_stack(self.w, self.w.rows, self.x.width // self.w.count, "(R, features of a group)")

    def compute(self, frame: NumpyFrame) -> None:
        x, w = frame[self.x], frame.weight(self.w)
        found = np.einsum("tgc,grc->tgr", x.reshape(len(x), self.w.count, -1), w)
        frame[self.out] = like(x, found.reshape(len(x), -1))
