"""Cases of ops for `BackendSuite`: a model around each op, small enough to compare every logit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vllmx_core.ops.op import Op
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.records import Record

from vllmx_testing.synthetic import Builder

Weights = Mapping[str, WeightRef]
Body = Callable[[Ops, Weights, StepInputs], Value]
Middle = Callable[[Ops, Weights, Value], Value]
Pooling = Callable[[Ops, Weights, Value, StepInputs], Value]


class Case(Record):
    """A model whose logits show the result of an op."""

    name: str
    build: Callable[[Builder], object]
    """Makes the weights."""
    body: Body
    vector_size: int = 0
    """Above 0: `body` returns vectors of this width instead of logits."""

    @classmethod
    def pooled(
        cls,
        name: str,
        width: int,
        pooling: Pooling,
        build: Callable[[Builder], object] | None = None,
        vector_size: int = 0,
    ) -> Case:
        """An embedding and the ops under test, from (T, width) to a vector for each text:
        `vector_size` numbers, `width` by default."""

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


Cases = Callable[[], Iterator[Case]]
_CASES: list[tuple[type[Op], Cases]] = []


def cases_of(op: type[Op]) -> Callable[[Cases], Cases]:
    """Registers a function that yields cases of an op."""

    def register(cases: Cases) -> Cases:
        _CASES.append((op, cases))
        return cases

    return register


def registered_cases() -> dict[str, Case]:
    """All cases by op and name, of the modules that were imported before."""
    return {f"{op.name}: {case.name}": case for op, cases in _CASES for case in cases()}
