"""`embedding`: rows of a table, one for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from vllmx_core.ops.case import Case, Weights
from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_weight
from vllmx_core.ops.values import StepInputs, TokenIds, Value, WeightRef
from vllmx_core.plan import I32, StepPlan

if TYPE_CHECKING:
    from vllmx_core.ops.case import Builder
    from vllmx_core.ops.recorder import Ops


class Embedding(Op):
    """The step's token ids, positions or token types (T,), plus `offset`, become the table's rows
    (T, E). A token type beyond the table is its last one: tokenizers tell two texts apart for
    models that do not. Every model begins with this op, so the cases of all are cases of it."""

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

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield Case("positions, from the third row on", _tables, _positions)
        yield Case("token types", _tables, _token_types)
        yield Case("token types of which there is one", _one_type, _token_types)


def numbers(plan: StepPlan, ids: TokenIds) -> I32:
    """(T,) what `ids` stands for."""
    if ids.source == "token_types" and plan.token_types is None:
        return np.zeros(plan.num_tokens, np.int32)
    found: I32 = getattr(plan, ids.source)
    return found


def embedding(ids: I32, table: Floats) -> Floats:
    """(T,), (V, E) -> (T, E)."""
    return table[ids]


def _one_type(builder: Builder) -> None:
    _tables(builder, types=1)


def _tables(builder: Builder, types: int = 2) -> None:
    builder.embedding("embed", 24)
    builder.embedding("places", 24, rows=128)
    builder.embedding("types", 24, rows=types)
    builder.linear("head", builder.vocab_size, 24)


def _positions(ops: Ops, w: Weights, step: StepInputs) -> Value:
    x = ops.add(
        ops.embedding(step.tokens, w["embed"]), ops.embedding(step.positions, w["places"], 2)
    )
    return ops.logits(x, step.logit_rows, w["head"])


def _token_types(ops: Ops, w: Weights, step: StepInputs) -> Value:
    x = ops.add(ops.embedding(step.tokens, w["embed"]), ops.embedding(step.token_types, w["types"]))
    return ops.logits(x, step.logit_rows, w["head"])
