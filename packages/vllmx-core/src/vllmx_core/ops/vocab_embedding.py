"""`vocab_embedding`: rows of a part of the vocabulary's table."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_weight
from vllmx_core.ops.values import ArrayFrame, TokenIds, Value, WeightRef


class VocabEmbedding(ArrayOp):
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

    def compute(self, frame: ArrayFrame[Any]) -> None:
        ids = frame.ids(TokenIds()) - self.first
        has = (ids >= 0) & (ids < self.w.rows)
        rows = frame.rows(self.w, frame.xp.where(has, ids, 0))
        frame[self.out] = frame.xp.where(has[:, None], rows, 0.0)
