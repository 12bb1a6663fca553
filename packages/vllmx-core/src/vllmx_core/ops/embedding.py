"""`embedding`: rows of a table, one for each token."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.ops.op import ArrayOp, expect, expect_weight
from vllmx_core.ops.values import ArrayFrame, TokenIds, Value, WeightRef


class Embedding(ArrayOp):
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

    def compute(self, frame: ArrayFrame[Any]) -> None:
        ids = frame.ids(self.ids) + self.offset
        if self.ids.source == "token_types":
            ids = frame.xp.clip(ids, 0, self.w.rows - 1)
        frame[self.out] = frame.rows(self.w, ids)
