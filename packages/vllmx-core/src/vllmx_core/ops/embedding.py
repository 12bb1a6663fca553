"""`embedding`: rows of a table, one for each token."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_weight
from vllmx_core.ops.values import TokenIds, Value, WeightRef
from vllmx_core.plan import I32, StepPlan


class Embedding(Op):
    """The step's token ids, positions or token types (T,), plus `offset`, become the table's rows
    (T, E). Token types are clamped to the last row: some tokenizers emit a second type that the
    model lacks. Every model begins with this op, so their cases test it."""

    name: ClassVar[str] = "embedding"
    ids: TokenIds
    w: WeightRef
    offset: int
    out: Value

    @classmethod
    def of(cls, ids: TokenIds, w: WeightRef, offset: int = 0) -> Embedding:
        expect_weight(w, "embedding")
        return cls(ids, w, offset, Value(w.cols))

    def check(self) -> None:
        given = "it takes step.tokens, step.positions or step.token_types, not features"
        expect(isinstance(self.ids, TokenIds), given)
        expect(0 <= self.offset < self.w.rows, f"{self.w.name!r} has no row {self.offset}")
        own = self.offset == 0 or self.ids.source == "positions"
        expect(own, "an offset is for positions alone")
        expect_weight(self.w, "embedding")

    def compute(self, frame: NumpyFrame) -> None:
        ids = numbers(frame.plan, self.ids) + np.int32(self.offset)
        if self.ids.source == "token_types":
            ids = np.minimum(ids, self.w.rows - 1)
        frame[self.out] = embedding(ids, frame.weight(self.w))


def numbers(plan: StepPlan, ids: TokenIds) -> I32:
    """(T,) what `ids` stands for."""
    if ids.source == "token_types" and plan.token_types is None:
        return np.zeros(plan.num_tokens, np.int32)
    found: I32 = getattr(plan, ids.source)
    return found


def embedding(ids: I32, table: Floats) -> Floats:
    """(T,), (V, E) -> (T, E)."""
    return table[ids]
