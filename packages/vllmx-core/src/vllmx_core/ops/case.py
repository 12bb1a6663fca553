"""A case of an op for `BackendSuite`: a model around the op, small enough to compare every logit.

Cases live in the op's own file, so that an op is one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.records import Record

if TYPE_CHECKING:
    from vllmx_core.ops.recorder import Ops

Weights = Mapping[str, WeightRef]
Body = Callable[["Ops", Weights, StepInputs], Value]
Middle = Callable[["Ops", Weights, Value], Value]
Pooling = Callable[["Ops", Weights, Value, StepInputs], Value]


class Builder(Protocol):
    """Makes the random weights of a case; `vllmx_testing.synthetic.Builder` is one."""

    vocab_size: int
    random: np.random.Generator
    arrays: dict[str, Any]
    """The stored tensors, by name."""

    def embedding(self, name: str, cols: int, rows: int | None = None) -> Self:
        """Adds a (rows, cols) table; the default for rows is the vocabulary."""

    def linear(
        self, name: str, rows: int | Sequence[int], cols: int, biases: Sequence[int] = ()
    ) -> Self:
        """Adds a matrix of one or several parts; the parts in `biases` have one."""

    def stack(
        self, name: str, count: int, rows: Sequence[int], cols: int, biases: Sequence[int] = ()
    ) -> Self:
        """Adds `count` matrices such as `linear` makes."""

    def tied(self, name: str, table: str, cols: int) -> Self:
        """Adds a head that is the table itself."""

    def vector(
        self, name: str, rows: int, offset: float = 0.0, centre: float = 1.0, spread: float = 0.3
    ) -> Self:
        """Adds values around `centre`, from which `offset` is subtracted."""

    def rope(self, name: str, rotary_dim: int, positions: int = 4096) -> None:
        """Adds a table of rotations."""


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
