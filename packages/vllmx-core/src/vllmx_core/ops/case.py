"""A case of an op for `BackendSuite`: a model around the op, small enough to compare every logit.

Cases stand in the op's own file, so that an op is one file; the kit's `Builder` is named here for
type checkers alone, so that models and backends do not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.records import Record

if TYPE_CHECKING:
    from vllmx_core.ops.recorder import Ops
    from vllmx_core.testing.synthetic import Builder

Weights = Mapping[str, WeightRef]
Body = Callable[["Ops", Weights, StepInputs], Value]
Middle = Callable[["Ops", Weights, Value], Value]
Pooling = Callable[["Ops", Weights, Value, StepInputs], Value]


class Case(Record):
    """What the op computes must reach the logits that `body` returns."""

    name: str
    build: Callable[[Builder], object]
    """Makes the weights."""
    body: Body
    vector_size: int = 0
    """Above 0: there are no logits, vectors of this width that `body` returns are compared."""

    @classmethod
    def pooled(
        cls,
        name: str,
        width: int,
        pooling: Pooling,
        build: Callable[[Builder], object] | None = None,
        vector_size: int = 0,
    ) -> Case:
        """An embedding and the ops under test, from (T, width) to a vector for each text, of
        `width` numbers too where `vector_size` does not say another."""

        def with_table(builder: Builder) -> None:
            if build is not None:
                build(builder)
            builder.embedding("embed", width)

        def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
            return pooling(ops, w, ops.embedding(step.tokens, w["embed"]), step)

        return cls(name, with_table, body, vector_size or width)

    @classmethod
    def between(
        cls, name: str, width: int, middle: Middle, build: Callable[[Builder], object] | None = None
    ) -> Case:
        """An embedding, the ops under test on (T, width), and a head."""

        def with_ends(builder: Builder) -> None:
            if build is not None:
                build(builder)
            builder.embedding("embed", width)
            builder.linear("head", builder.vocab_size, width)

        def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
            x = middle(ops, w, ops.embedding(step.tokens, w["embed"]))
            return ops.logits(x, step.logit_rows, w["head"])

        return cls(name, with_ends, body)
