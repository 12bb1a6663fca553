"""`vocab_embedding`: rows of a part of the vocabulary's table."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_weight
from vllmx_core.ops.values import Value, WeightRef


class VocabEmbedding(Op):
    """The step's tokens (T,) become (T, E): the table's rows for ids from `first` on, zeros for ids
    that the table does not have. Over all ranks the sum is the embedding."""

    name: ClassVar[str] = "vocab_embedding"
    w: WeightRef
    first: int
    out: Value

    @classmethod
    def of(cls, w: WeightRef, first: int) -> VocabEmbedding:
        expect_weight(w, "embedding")
        return cls(w, first, Value(w.cols))

    def check(self) -> None:
        expect(self.first >= 0, f"the first id is {self.first}, it must not be negative")
        expect_weight(self.w, "embedding")

    def compute(self, frame: NumpyFrame) -> None:
        table = frame.weight(self.w)
        ids = frame.plan.tokens - np.int32(self.first)
        has = (ids >= 0) & (ids < len(table))
        rows = table[np.where(has, ids, 0)]
        frame[self.out] = np.where(has[:, None], rows, table.dtype.type(0))
