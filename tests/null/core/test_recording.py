"""Recording a model: what is checked, what an author reads, and what a backend refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from vllmx_core.errors import OpError, UnsupportedModelError, UnsupportedOpError
from vllmx_core.model import AttentionSpec, LatentSpec, Ops, StepInputs
from vllmx_core.ops.add import Add
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op
from vllmx_core.ops.recorder import OPS
from vllmx_core.ops.route import RouteSpec
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.recorded import recording
from vllmx_core.recorded.op_table import OpTable
from vllmx_core.recorded.recording import prepare, record
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_testing.harness import load_options
from vllmx_testing.op_checks import CASES, case_model
from vllmx_testing.synthetic import Builder, SyntheticModel, tiny_decoder

STEP = StepInputs()
EMBED = WeightRef("embed", "embedding", 50, 8)
UP, NORM = WeightRef("layers.3.up", "linear", 16, 8), WeightRef("layers.3.norm", "vector", 8)
TABLE = WeightRef("rope", "constant", 64, 4)
SPEC = AttentionSpec(3, 2, 1, 4, scale=0.5)
LATENT = LatentSpec(5, num_heads=2, rank=6, nope_size=3, rotary_dim=4, value_size=9, scale=0.5)
K_B, V_B = WeightRef("k_b", "stack", 6, 3, 2), WeightRef("v_b", "stack", 9, 6, 2)


def latent(ops: Ops, **changed: Any) -> Value:
    """Latent attention with all that it needs, but for what is changed."""
    x = ops.embedding(STEP.tokens, EMBED)
    given = {
        "q": ops.linear(x, WeightRef("q", "linear", 14, 8)),
        "latent": ops.linear(x, WeightRef("latent", "linear", 10, 8)),
        "spec": LATENT,
        "step": STEP,
        "rope": TABLE,
        "norm": WeightRef("n", "vector", 6),
        "k_b": K_B,
        "v_b": V_B,
    } | changed
    return ops.latent_attention(**given)


GATE_UP, DOWN = WeightRef("gu", "stack", 6, 8, 8), WeightRef("down", "stack", 8, 3, 8)


def experts(ops: Ops, x: Value, **changes: Any) -> Value:
    """Records experts with whatever is wrong in `changes`."""
    ids, weights = ops.route(x, RouteSpec(2))
    given = {"ids": ids, "weights": weights, "gate_up": GATE_UP, "down": DOWN}
    return ops.experts(x, **{**given, "spec": ExpertsSpec(), **changes})


def wrong(call: Callable[[Ops, Value], object]) -> str:
    """What the author of a model reads."""
    ops = Ops("Mine")
    x = ops.embedding(STEP.tokens, EMBED)
    with pytest.raises(OpError) as caught:
        call(ops, x)
    return caught.value.message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o, x: o.linear(o.linear(x, UP), UP),
         "Mine: linear: 'layers.3.up' has 8 columns, x has 16 features"),
        (lambda o, x: o.linear(x, NORM), "'layers.3.norm' is of kind 'vector', not 'linear'"),
        (lambda o, x: o.linear(x, None), "linear .*: None is not a weight of the model"),
        (lambda o, x: o.linear(x, TABLE), "'rope' is of kind 'constant', not 'linear'"),
        (lambda o, x: o.embedding(x, EMBED), "embedding: it takes step.tokens"),
        (lambda o, x: o.rms_norm(o.linear(x, UP), NORM, 0.1),
         "rms_norm: 'layers.3.norm' has 8 values, not 16"),
        (lambda o, x: o.rms_norm(x, NORM, 0.0), "eps is 0.0"),
        (lambda o, x: o.layer_norm(o.linear(x, UP), w=NORM, bias=None, eps=0.1),
         "Mine: layer_norm: 'layers.3.norm' has 8 values, not 16"),
        (lambda o, x: o.add(o.linear(x, UP), x),
         r"add \(after the op with 'layers.3.up'\): x has 16 features, y has 8"),
        (lambda o, x: o.add_rms_norm(x, o.linear(x, UP), NORM, 0.1),
         "x has 8 features, residual has 16"),
        (lambda o, x: o.layer_norm(x, NORM, UP, 0.1), "'layers.3.up' is of kind 'linear'"),
        (lambda o, x: o.gated_act(x, "swish"), "unknown activation 'swish': choose silu, gelu"),
        (lambda o, x: o.activation(x, "swish"), "unknown activation 'swish'"),
        (lambda o, x: o.scale(x, "two"), "the factor is 'two', no number"),
        (lambda o, x: o.scale(o.linear(x, UP), TABLE), "'rope' is of kind 'constant'"),
        (lambda o, x: o.scale(x, WeightRef("s", "vector", 3)),
         "scale_by: 's' has 3 values, which do not divide x's 8 features"),
        (lambda o, x: o.scale(x, WeightRef("s", "vector", 0)), "'s' has 0 values, which do not"),
        (lambda o, x: o.clip(x, WeightRef("s", "vector", 2), x),
         "clip: 's' has 2 values, not two for each of 2 operands"),
        (lambda o, x: o.clip(x, UP), "clip: 'layers.3.up' is of kind 'linear'"),
        (lambda o, x: o.gate(x, o.linear(x, WeightRef("n", "linear", 0, 8)), "tanh"),
         "gate .*: g has 0 features, which do not divide x's 8"),
        (lambda o, x: o.gate(x, o.linear(x, UP), "tanh"),
         "gate .*: g has 16 features, which do not divide x's 8"),
        (lambda o, x: o.gate(x, x, "swish"), "unknown gate 'swish': choose silu"),
        (lambda o, x: o.route(x, RouteSpec(9)), "route .*: 9 experts chosen of 8"),
        (lambda o, x: o.route(x, RouteSpec(2, groups=3)), "8 experts do not lie in 3 equal groups"),
        (lambda o, x: o.route(x, RouteSpec(3, groups=4)), "3 experts chosen of 2 in 1 of 4 groups"),
        (lambda o, x: o.route(x, RouteSpec(2, groups=4, groups_kept=5)), "5 groups kept of 4"),
        (lambda o, x: o.route(x, RouteSpec(1, groups=8, group_score="best_two")),
         "the best two of groups of 1 expert"),
        (lambda o, x: o.route(x, RouteSpec(2), bias=WeightRef("b", "vector", 7)),
         "'b' has 7 values, not 8"),
        (lambda o, x: o.route(x, 2), "spec is 2, not a RouteSpec"),
        (lambda o, x: o.scale(o.route(x, RouteSpec(2))[1], 2.0), "only `experts` takes it"),
        (lambda o, x: experts(o, x, ids=x), "experts.*: ids is .*, not what `route` returned"),
        (lambda o, x: experts(o, x, weights=x), "weights is .*, not what `route` returned"),
        (lambda o, x: experts(o, x, down=UP), "'layers.3.up' is of kind 'linear', not 'stack'"),
        (lambda o, x: experts(o, x, down=replace(DOWN, count=7)),
         "'gu' has 8 experts, 'down' has 7"),
        (lambda o, x: experts(o, x, gate_up=replace(GATE_UP, count=6), down=replace(DOWN, count=6)),
         "'gu' has 6 experts, the ids are those of 8"),
        (lambda o, x: experts(o, x, down=replace(DOWN, rows=9)),
         r"'down' has matrices \(9, 3\), not \(features of x, F\) = \(8, 3\)"),
        (lambda o, x: experts(o, x, spec=ExpertsSpec(gated=False)),
         r"'gu' has matrices \(6, 8\), not \(F, features of x\) = \(3, 8\)"),
        (lambda o, x: experts(o, x, spec=ExpertsSpec("gelu", clamp=7.0)), "gated by silu"),
        (lambda o, x: experts(o, x, spec=ExpertsSpec(alpha=2.0)), "for experts with a clamp alone"),
        (lambda o, x: experts(o, x, weights=o.route(x, RouteSpec(3))[1]),
         "ids has 2 slots, weights has 3"),
        (lambda o, x: o.scale(3, 2.0), "x is 3, not what another op returned"),
        (lambda o, x: o.add(x, Ops().embedding(STEP.tokens, EMBED)), "from another recording"),
        (lambda o, x: o.attention(x, SPEC, STEP),
         r"layer 3: qkv has 8 features, not \(2 \+ 2 \* 1\) \* 4 = 16"),
        (lambda o, x: o.attention(o.linear(x, UP), SPEC, STEP, rope=TABLE),
         "layer 3: rope is given, rotary_dim is 0"),
        (lambda o, x: o.attention(o.linear(x, UP), SPEC, STEP, q_norm=NORM),
         "'layers.3.norm' has 8 values, not 4"),
        (lambda o, x: o.attention(o.linear(x, UP), SPEC, None), "pass on the step itself"),
        (lambda o, x: latent(o, q=x), r"layer 5: q has 8 features, not 2 \* \(3 \+ 4\) = 14"),
        (lambda o, x: latent(o, latent=x), r"layer 5: latent has 8 features, not 6 \+ 4 = 10"),
        (lambda o, x: latent(o, v_b=K_B), "'k_b' is 2 matrices of 6 x 3, not 2 of 9 x 6"),
        (lambda o, x: latent(o, k_b=UP), "'layers.3.up' is of kind 'linear', not 'stack'"),
        (lambda o, x: latent(o, rope=NORM), "'layers.3.norm' is of kind 'vector', not 'constant'"),
        (lambda o, x: latent(o, norm=NORM), "'layers.3.norm' has 8 values, not 6"),
        (lambda o, x: latent(o, step=None), "layer 5: pass on the step itself"),
        (lambda o, x: o.logits(x, STEP.tokens, UP), "rows must be step.logit_rows"),
        (lambda o, x: o.scale(o.logits(x, STEP.logit_rows, UP), 2.0), "x holds logits"),
        (lambda o, x: o.finished(x, 50), r"forward returned .*, not \(L, 50\) logits"),
        (lambda o, x: bool(x), "branches on a value"),
        (lambda o, x: list(x), "iterates over an array"),
    ],
)  # fmt: skip
def test_a_mistake_of_a_model_is_named(call: Any, message: str) -> None:
    text = wrong(call)

    assert re.search(message, text), text


def test_forward_runs_once_a_load_and_names_what_it_used() -> None:
    builder, calls = Builder(19), []
    model = tiny_decoder(builder)

    def body(ops: Ops, w: Any, step: StepInputs) -> Value:
        calls.append(step)
        return model.body(ops, w, step)

    counted = SyntheticModel(model.shape, model.specs, model.tables, body)
    found = record(counted, 128)
    assert len(calls) == 1
    assert found.model == "SyntheticModel"
    assert found.unused_weights == set()
    assert len(found.steps.ops) == 1 + 2 * 8 + 2


def test_every_op_of_core_has_cases() -> None:
    recorded = set()
    for case in CASES.values():
        model, _ = case_model(case)
        recorded |= {type(op) for op in record(model, 16).steps.ops}
    others = {op.__name__ for op in set(OPS) - recorded}
    assert others == {
        "Attention", "LatentAttention", "Recurrence", "ShortConv", "GatedLinear",
        "Indexer", "Patches", "Mix", "Merge", "Keep", "Place", "Tap", "VocabEmbedding",
        "AllReduce", "AllGather", "Slice", "Send", "Recv", "Combine", "Adapt",
        "Compress", "CompressedAttention", "CrossAttention", "Unfold", "Downsample",
    }  # fmt: skip  # own suites; what a pass makes


def test_the_names_of_ops_are_different() -> None:
    assert len({op.name for op in OPS}) == len(OPS)


def table(**when: Callable[[Any], bool]) -> OpTable[None, str]:
    """Linear, add and scale alone, of which `when` may take some away."""
    made: OpTable[None, str] = OpTable("small")
    for op in (Linear, Add, Scale):
        made.add(op, when.get(op.name))(lambda op, context: type(op).__name__)
    return made


def test_a_table_calls_by_type_and_refuses_what_it_lacks() -> None:
    x = Value(8)
    small = table(scale=lambda op: op.factor > 0)
    assert small(Add(x, x, Value(8)), None) == "Add"
    assert small.supports(Scale(x, 1.0, Value(8)))
    assert not small.supports(Scale(x, -1.0, Value(8)))
    assert not small.supports(GatedAct(x, "silu", Value(4)))
    with pytest.raises(UnsupportedOpError, match="'small' has no op 'gated_act' \\(kind silu\\)"):
        small(GatedAct(x, "silu", Value(4)), None)


def test_a_model_with_an_op_that_a_backend_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal names the op, and the backends that have it."""
    numpy = SimpleNamespace(
        name="numpy", unavailable_reason=lambda: None, load=lambda: ReferenceBackend
    )
    absent = SimpleNamespace(name="absent", unavailable_reason=lambda: "no GPU", load=None)
    old = SimpleNamespace(name="old", unavailable_reason=lambda: None, load=lambda: object)
    registry = SimpleNamespace(all=lambda kind: [numpy, absent, old])
    monkeypatch.setattr(recording, "load_registry", lambda: registry)

    def supports(op: Op) -> bool:
        return not isinstance(op, GatedAct)

    with pytest.raises(UnsupportedModelError) as caught:
        prepare(tiny_decoder(Builder(19)), 128, "mine", supports)
    assert caught.value.message == (
        "model SyntheticModel needs the op 'gated_act' (kind silu), which backend 'mine' does not"
        " have: choose --backend numpy, or a newer version of vllmx-mine"
    )
    assert caught.value.param == "backend"


class Twice(Op):
    """An op of a plugin."""

    name: ClassVar[str] = "twice"
    x: Value
    out: Value

    def check(self) -> None:
        pass

    def expand(self) -> tuple[Op, ...]:
        return (Add(self.x, self.x, self.out),)


class Thrice(Twice):
    """One that nobody has."""

    def expand(self) -> tuple[Op, ...]:
        return ()


def with_op(kind: type[Twice]) -> tuple[SyntheticModel, Builder]:
    builder = Builder(19).embedding("embed", 8).linear("head", 19, 8)

    def body(ops: Ops, w: Any, step: StepInputs) -> Value:
        x = ops.embedding(step.tokens, w["embed"])
        return ops.logits(ops.put(kind(x, Value(8))).out, step.logit_rows, w["head"])

    return builder.build(8, body), builder


class NoWeights:
    """A source that nobody may read."""

    def part(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


def test_an_op_of_a_plugin_runs_by_what_it_expands_into() -> None:
    names = [
        op.name
        for op in prepare(with_op(Twice)[0], 128, "numpy", ReferenceBackend().supports).steps.ops
    ]
    assert names == ["embedding", "add", "logits"]


def test_a_refusal_comes_before_any_weight_is_read() -> None:
    with pytest.raises(UnsupportedOpError, match="needs the op 'twice'"):
        ReferenceBackend().load(with_op(Thrice)[0], NoWeights(), load_options("f32", {}))  # type: ignore[arg-type]


def test_an_operand_of_another_kind_is_refused() -> None:
    with pytest.raises(OpError, match="an operand comes from another recording"):
        Ops().put(Twice(Value(8), Value(8)))
