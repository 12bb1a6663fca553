"""The suites themselves: each mistake that a backend or a model could make is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core import kv_quant, reference
from vllmx_core.backend import Backend, LoadOptions
from vllmx_core.errors import ConfigError, OpError
from vllmx_core.interpreter import Interpreter
from vllmx_core.model import Array, KVSpec, Model, Ops, StepInputs, Weight
from vllmx_core.ops.activation import Act
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.gate import Gate, gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head import Head
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_by import ScaleBy, scale_by
from vllmx_core.reference_backend import ReferenceBackend, ReferenceLoadedModel, ReferenceStep
from vllmx_core.testing.attention_checks import FEATURES
from vllmx_core.testing.backend_suite import BackendSuite
from vllmx_core.testing.model_suite import ModelSuite
from vllmx_core.testing.sampler_checks import CASES
from vllmx_core.testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

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
            frame = NumpyFrame(self._weights, plan, self._pages, self._info.kv_cache_dtype)
            steps = Interpreter(self._steps, lambda op: compute if type(op) is kind else formula)
            return steps.run(frame)

        patch.setattr(BrokenLoaded, "logits", logits)

    return change


def formula(op: Op, frame: NumpyFrame) -> None:
    op.compute(frame)


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


ONES = np.ones_like
MISTAKES: dict[str, tuple[Change, Callable[[Suite], None]]] = {
    "window off by one": (
        with_spec(window=lambda s: s.window and s.window + 1), attention("window 5")
    ),
    "window ignored": (with_spec(window=None), attention("window 23")),
    "softcap ignored": (with_spec(softcap=None), attention("softcap")),
    "sinks ignored": (without("sinks"), attention("sinks")),
    "scale ignored": (with_spec(scale=0.25), attention("scale")),
    "norm eps ignored": (with_spec(norm_eps=1e-6), attention("qk norm eps")),
    "norm ignored": (without("k_norm"), attention("qk norm")),
    "rope ignored": (without("rope"), attention("rope")),
    "wrong pairs": (with_spec(interleaved=False), attention("rope interleaved")),
    "causal ignored": (with_spec(causal=False), attention("multi-head")),
    "causal always": (with_spec(causal=True), method("test_attention_both_ways")),
    **{
        f"{what} instead of {kv}": (change, method("test_attention_over_codes", kv, {}))
        for kv, what, change in (
            ("int8", "no rounding", with_cache(None)),
            ("int8", "bf16", with_cache("bf16")),
            ("int8", "fp8", with_cache("fp8")),
            ("fp8", "int8", with_cache("int8")),
            ("int8", "a scale for a token", scale_of_all_heads),
        )
    },
    "eps ignored": (
        broken_op(RmsNorm, lambda op, frame: replace(op, eps=1e-12).compute(frame)),
        op_case("rms_norm: width 16, offset 0.0"),
    ),
    "residual forgotten": (
        broken_op(AddRmsNorm, lambda op, frame: replace(op, residual=op.x).compute(frame)),
        op_case("add_rms_norm: width 33, offset 1.0"),
    ),
    "bias ignored": (
        broken_op(Linear, lambda op, frame: frame.__setitem__(
            op.out, reference.linear(frame[op.x], frame.weight(op.w))
        )),
        op_case("linear: fused parts with some biases"),
    ),
    "gelu by tanh": (
        broken_op(Act, lambda op, frame: replace(op, kind="gelu_tanh").compute(frame)),
        op_case("activation: gelu, width 16"),
    ),
    "gate and up swapped": (
        broken_op(GatedAct, lambda op, frame: frame.__setitem__(op.out, reference.gated_act(
            np.roll(frame[op.gate_up], op.out.width, 1), op.kind
        ))),
        op_case("gated_act: silu, width 16"),
    ),
    "factor ignored": (
        broken_op(Scale, lambda op, frame: frame.__setitem__(op.out, frame[op.x])),
        op_case("scale: width 24"),
    ),
    "values of another feature": (
        broken_op(ScaleBy, lambda op, frame: frame.__setitem__(
            op.out, scale_by(frame[op.x], np.roll(frame.weight(op.w), 1))
        )),
        op_case("scale_by: 3 for 48"),
    ),
    "a head has the gate of another": (
        broken_op(Gate, lambda op, frame: frame.__setitem__(
            op.out, gate(frame[op.x], np.roll(frame[op.g], 1, axis=1), op.kind)
        )),
        op_case("gate: sigmoid, 2 for 96"),
    ),
    "a gate of another kind": (
        broken_op(Gate, lambda op, frame: replace(op, kind="relu").compute(frame)),
        op_case("gate: relu2, 3 for 48"),
    ),
    "softcap of the head ignored": (
        broken_op(Head, lambda op, frame: replace(op, softcap=None).compute(frame)),
        op_case("logits: softcap 2.5, tied"),
    ),
    "temperature ignored": (
        with_columns(temperature=lambda t: np.where(t > 0, ONES(t), t)), sampler("temperature")
    ),
    "top_k ignored": (with_columns(top_k=np.zeros_like), sampler("top_k")),
    "top_p ignored": (with_columns(top_p=np.ones_like), sampler("top_p")),
    "min_p ignored": (with_columns(min_p=np.zeros_like), sampler("min_p")),
    "position ignored": (with_columns(position=np.zeros_like), sampler("temperature")),
    "seed's upper half ignored": (
        with_columns(seed=lambda s: s & np.uint64(0xFFFFFFFF)), sampler("temperature")
    ),
    "edits ignored": (with_columns(edits=None), method("test_edits", 0.8)),
    "masks ignored": (with_columns(masks=None), method("test_masks", 0.0)),
    "counts ignored": (
        with_columns(counts=None), method("test_penalties", 0.0, {"repetition_penalty": 1.7})
    ),
    "pending ignored": (
        with_columns(counts=lambda c: c and replace(c, pending=np.zeros_like(c.pending))),
        method("test_penalties", 0.0, {"repetition_penalty": 1.7}),
    ),
    "masks that come late ignored": (
        late(masks=None, mask_index=None),
        method("test_a_step_is_sampled_when_the_one_before_was_read"),
    ),
    "parameters that come late ignored": (
        late(counts=None), method("test_halves_of_a_step_are_the_step", False)
    ),
    "ids that come late forgotten": (
        late(last_ids=np.zeros_like), method("test_halves_and_whole_steps_take_turns")
    ),
    "targets ignored": (
        with_columns(target=lambda t: np.full_like(t, -1)), method("test_targets_are_scored")
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_backend_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, test = MISTAKES[mistake]
    test(Suite())
    change(monkeypatch)
    with pytest.raises(AssertionError):
        test(Suite())


def test_references_that_are_not_resolved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    test = method("test_references_to_the_step_before")
    test(Suite())
    monkeypatch.setattr(BrokenLoaded, "resolve", lambda self, tokens: np.maximum(tokens, 0))
    with pytest.raises(AssertionError):
        test(Suite())


def test_stale_pages_that_leak_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys beyond the context, masked by a zero weight: 0 * NaN."""
    test = method("test_what_a_page_held_before_does_not_leak")
    test(Suite())

    def leaky(op: Attention, frame: NumpyFrame) -> Any:
        out, pages, plan = attended(op, frame), frame.pages[op.spec.layer], frame.plan
        page = pages.v.shape[1]
        for row in range(plan.num_rows):
            length = int(plan.context_len[row])
            last = pages.v[plan.block_tables[0][row, (length - 1) // page]]
            end = plan.query_start[row + 1]
            out[plan.query_start[row] : end] += 0 * last.sum()
        return out

    broken_attention(leaky)(monkeypatch)
    with pytest.raises(AssertionError):
        test(Suite())


def body_of(**changes: Any) -> type[ModelSuite]:
    """ModelSuite over the tiny decoder with something wrong in it."""

    class Broken(ModelSuite):
        config = {"vocab_size": 19}  # noqa: RUF012

        def make_model(self, config: dict[str, Any]) -> Model:
            builder = Builder(config["vocab_size"])
            model = replace(tiny_decoder(builder), **changes)
            change = changes.get("body")
            return model if change is None else replace(model, body=change)

    return Broken


def test_a_right_model_passes_the_model_suite() -> None:
    suite = body_of()()
    suite.test_shape_says_what_the_config_says()
    suite.test_weight_map_is_consistent()
    suite.test_forward_is_recorded_and_uses_every_weight()
    suite.test_attention_layers_match_the_kv_cache()
    suite.test_constants_are_float32()
    suite.test_chunks_do_not_change_the_logits(7)
    suite.test_positions_and_order_matter()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({}, None), ({"scale": 1.0}, "broken, chunk 1"), ({"window": 5}, "broken, chunk 1")],
)
def test_the_model_suite_finds_a_backend_that_disagrees(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str | None
) -> None:
    with_spec(**changes)(monkeypatch)
    spec = SimpleNamespace(
        name="broken", unavailable_reason=lambda: None, load=lambda: BrokenBackend
    )
    registry = SimpleNamespace(all=lambda kind: [spec])
    monkeypatch.setattr("vllmx_core.testing.model_suite.load_registry", lambda: registry)
    test = body_of()().test_installed_backends_agree_with_the_reference
    if message is None:
        test()
        return
    with pytest.raises(AssertionError, match=message):
        test()


def values_seen(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    x = ops.embedding(step.tokens, w["embed"])
    return x if x else ops.add(x, x)


def wrong_width(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    return ops.linear(ops.embedding(step.tokens, w["embed"]), w["0.down"])


def unused(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    return ops.logits(ops.embedding(step.tokens, w["embed"]), step.logit_rows, w["head"])


def not_logits(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    return ops.embedding(step.tokens, w["embed"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (values_seen, "branches on a value"),
        (wrong_width, "has 40 columns, x has 32 features"),
        (unused, "never uses"),
        (not_logits, "not \\(L, 19\\) logits"),
    ],
)
def test_a_wrong_forward_pass_is_found(body: Any, message: str) -> None:
    with pytest.raises((AssertionError, OpError), match=message):
        body_of(body=body)().test_forward_is_recorded_and_uses_every_weight()


def test_layers_that_do_not_match_the_cache_are_found() -> None:
    model: SyntheticModel = tiny_decoder(Builder(19))
    kv = (KVSpec(2, 8), KVSpec(2, 8, window=5))
    suite = body_of(shape=replace(model.shape, caches=kv))()
    with pytest.raises(AssertionError, match="layer 1"):
        suite.test_attention_layers_match_the_kv_cache()


def test_doubled_and_disagreeing_weights_are_found() -> None:
    model: SyntheticModel = tiny_decoder(Builder(19))
    with pytest.raises(AssertionError, match="twice"):
        body_of(specs=model.specs * 2)().test_weight_map_is_consistent()
    other = replace(model.specs[0], name="other", cols=33)
    with pytest.raises(AssertionError, match=r"embed\.weight"):
        body_of(specs=(*model.specs, other))().test_weight_map_is_consistent()


def test_the_numpy_backend_refuses_what_it_cannot_compute() -> None:
    builder = Builder(19)
    model = tiny_decoder(builder)
    refusals = {
        "choose f32, f64": LoadOptions(dtype="bf16"),
        "'int3': choose auto, bf16.*int8": LoadOptions(kv_cache_dtype="int3"),
    }
    for message, options in refusals.items():
        with pytest.raises(ConfigError, match=message):
            ReferenceBackend().load(model, ArraySource(builder.arrays), options)
