"""Mistakes planted into the reference backend, and how to name the test that must find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.backend import Backend
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op
from vllmx_core.ops.route import Route, route
from vllmx_core.recorded.interpreter import Interpreter
from vllmx_core.reference import formulas as reference
from vllmx_core.reference.backend import ReferenceBackend, ReferenceLoadedModel, ReferenceStep
from vllmx_testing.attention_checks import FEATURES
from vllmx_testing.backend_suite import BackendSuite
from vllmx_testing.sampler_checks import CASES

Change = Callable[[pytest.MonkeyPatch], None]
Compute = Callable[[Any, NumpyFrame], None]


class BrokenLoaded(ReferenceLoadedModel):
    """The reference with one method of its ops or of itself replaced."""


class BrokenBackend(ReferenceBackend):
    """Loads `BrokenLoaded`, so that the oracle of the suite stays whole."""

    def load(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().load(*args, **kwargs)
        broken = BrokenLoaded.__new__(BrokenLoaded)
        broken.__dict__.update(whole.__dict__)
        return broken


class Suite(BackendSuite):
    exact_batches = False

    def make_backend(self) -> Backend:
        return BrokenBackend()


def broken_op(kind: type[Op], compute: Compute) -> Change:
    """Another formula for one op, for BrokenLoaded alone."""

    def change(patch: pytest.MonkeyPatch) -> None:
        def logits(self: Any, plan: Any) -> Any:
            plan = replace(plan, tokens=self.resolve(plan.tokens))
            kv = self._info.kv_cache_dtype
            frame = NumpyFrame(self._weights, plan, self._pages, kv, self._states)
            steps = Interpreter(self._steps, lambda op: compute if type(op) is kind else formula)
            return steps.run(frame)

        patch.setattr(BrokenLoaded, "logits", logits)

    return change


def formula(op: Op, frame: NumpyFrame) -> None:
    op.compute(frame)


def routed(change: Callable[..., tuple[Any, Any]]) -> Change:
    """`route` with other ids and weights."""

    def compute(op: Route, frame: NumpyFrame) -> None:
        op.compute(frame)
        results = (frame[value].copy() for value in op.writes)
        frame[op.ids], frame[op.slot_weights] = change(op, frame, *results)

    return broken_op(Route, compute)


def ties_to_the_higher(op: Route, frame: NumpyFrame) -> None:
    """The same logits the other way round."""
    ids, frame[op.slot_weights] = route(frame[op.logits][:, ::-1], op.spec)
    frame[op.ids] = op.logits.width - 1 - ids


def broken_attention(change: Callable[[Attention, NumpyFrame], Any]) -> Change:
    """Attention that returns something else."""

    def compute(op: Attention, frame: NumpyFrame) -> None:
        frame[op.out] = change(op, frame)

    return broken_op(Attention, compute)


def attended(op: Attention, frame: NumpyFrame, kv_dtype: str | None = None) -> Any:
    pages, weights = frame.pages[op.spec.layer], op.bound(frame.weight)
    qkv = frame[op.qkv]
    return reference.attention(qkv, op.spec, frame.plan, pages.k, pages.v, kv_dtype, weights)


def with_spec(**changes: Any) -> Change:
    """Attention that overlooks a feature."""

    def change(op: Attention, frame: NumpyFrame) -> Any:
        made = {k: v(op.spec) if callable(v) else v for k, v in changes.items()}
        return attended(replace(op, spec=replace(op.spec, **made)), frame)

    return broken_attention(change)


def with_tables(change: Callable[[Any], Any]) -> Change:
    """Attention that looks for its pages in another place than it was told."""

    def moved(op: Attention, frame: NumpyFrame) -> Any:
        pages, weights, plan = frame.pages[op.spec.layer], op.bound(frame.weight), frame.plan
        tables = tuple(change(list(plan.block_tables)))
        plan = replace(plan, block_tables=tables)
        return reference.attention(
            frame[op.qkv], op.spec, plan, pages.k, pages.v, frame.kv_dtype, weights
        )

    return broken_attention(moved)


def without(weight: str) -> Change:
    """Attention that overlooks one of its weights."""
    return broken_attention(lambda op, frame: attended(replace(op, **{weight: None}), frame))


def with_cache(kv_dtype: str | None) -> Change:
    """A cache of another dtype than what it claims."""
    return broken_attention(lambda op, frame: attended(op, frame, kv_dtype))


def _scale_of_all_heads(op: Attention, frame: NumpyFrame) -> Any:
    """Codes with one scale for a token instead of one for each of its kv heads."""
    qkv, spec = frame[op.qkv], op.spec
    heads = qkv.reshape(len(qkv), -1, spec.head_size)
    together = heads[:, spec.num_heads :].reshape(len(qkv), 2, -1)
    assert frame.kv_dtype is not None
    heads[:, spec.num_heads :] = kv_quant.rounded(together, frame.kv_dtype).reshape(
        len(qkv), -1, spec.head_size
    )
    return attended(op, frame)


scale_of_all_heads = broken_attention(_scale_of_all_heads)


def _unturned_codes(op: Attention, frame: NumpyFrame) -> Any:
    """q4 of the vectors as they are."""
    qkv, spec = frame[op.qkv], op.spec
    heads = qkv.reshape(len(qkv), -1, spec.head_size)
    turned = kv_quant.rounded(kv_quant.turned(heads[:, spec.num_heads :]), "q4")
    heads[:, spec.num_heads :] = kv_quant.turned(turned)
    return attended(op, frame)


unturned_codes = broken_attention(_unturned_codes)


def with_columns(**changes: Any) -> Change:
    """A sampler that overlooks a column."""

    def change(patch: pytest.MonkeyPatch) -> None:
        def step(self: Any, plan: Any, rows: Any) -> Any:
            made = {k: v(getattr(rows, k)) if callable(v) else v for k, v in changes.items()}
            return ReferenceLoadedModel.step(self, plan, replace(rows, **made))

        patch.setattr(BrokenLoaded, "step", step)

    return change


def late(**changes: Any) -> Change:
    """A second half of a step with something wrong in it."""

    def change(patch: pytest.MonkeyPatch) -> None:
        def draw(self: Any, rows: Any) -> None:
            rows = replace(rows, **{k: v for k, v in changes.items() if k != "last_ids"})
            whole(self, rows)
            if "last_ids" in changes:
                self._owner.last_ids = changes["last_ids"](self._owner.last_ids)

        def sample(self: Any, rows: Any) -> Any:
            with self._owner.in_flight.sampling(self, rows):
                draw(self, rows)
            return self

        whole = ReferenceStep.draw
        patch.setattr(ReferenceStep, "sample", sample)

    return change


def method(name: str, *arguments: Any) -> Callable[[Suite], None]:
    """A test of the suite with its parameters."""
    return lambda suite: getattr(suite, name)(*arguments)


def op_case(name: str) -> Callable[[Suite], None]:
    return method("test_op", name)


def attention(feature: str) -> Callable[[Suite], None]:
    return method("test_attention", FEATURES[feature])


def sampler(case: str) -> Callable[[Suite], None]:
    return method("test_one_setting_in_all_rows", CASES[case])
