"""`embedding`: rows of a table, one for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_weight
from vllmx_core.ops.values import TokenIds, Value, WeightRef
from vllmx_core.plan import I32


@dataclass(frozen=True, slots=True, eq=False)
class Embedding(Op):
    """The step's token ids (T,) become the table's rows (T, E). Every model begins with it, so the
    cases of all ops are cases of this one."""

    name: ClassVar[str] = "embedding"
    ids: TokenIds
    w: WeightRef
    out: Value

    @classmethod
    def of(cls, ids: TokenIds, w: WeightRef) -> Embedding:
        expect_weight(w, "embedding")
        return cls(ids, w, Value(w.cols))

    def check(self) -> None:
        expect(isinstance(self.ids, TokenIds), "it takes step.tokens, not features")
        expect_weight(self.w, "embedding")

    def compute(self, frame: NumpyFrame) -> None:
        frame[self.out] = embedding(frame.plan.tokens, frame.weight(self.w))


def embedding(ids: I32, table: Floats) -> Floats:
    """(T,), (V, E) -> (T, E)."""
    return table[ids]
