"""Recording a model: what is checked, what an author reads, and what a backend refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from vllmx_core import recording
from vllmx_core.errors import OpError, UnsupportedModelError, UnsupportedOpError
from vllmx_core.model import AttentionSpec, Ops, StepInputs
from vllmx_core.op_table import OpTable
from vllmx_core.ops.add import Add
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op
from vllmx_core.ops.recorder import OPS
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.recording import prepare, record
from vllmx_core.reference_backend import ReferenceBackend
from vllmx_core.testing.harness import load_options
from vllmx_core.testing.op_checks import CASES
from vllmx_core.testing.synthetic import Builder, SyntheticModel, tiny_decoder

STEP = StepInputs()
EMBED = WeightRef("embed", "embedding", 50, 8)
UP, NORM = WeightRef("layers.3.up", "linear", 16, 8), WeightRef("layers.3.norm", "vector", 8)
TABLE = WeightRef("rope", "constant", 64, 4)
SPEC = AttentionSpec(3, 2, 1, 4, scale=0.5)


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
        (lambda o, x: o.linear(x, None), "linear .*: None is no weight of the model"),
        (lambda o, x: o.linear(x, TABLE), "'rope' is of kind 'constant', not 'linear'"),
        (lambda o, x: o.embedding(x, EMBED), "embedding: it takes step.tokens"),
        (lambda o, x: o.rms_norm(o.linear(x, UP), NORM, 0.1),
         "rms_norm: 'layers.3.norm' has 8 values, not 16"),
        (lambda o, x: o.rms_norm(x, NORM, 0.0), "eps is 0.0"),
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
        (lambda o, x: o.gate(x, o.linear(x, WeightRef("n", "linear", 0, 8)), "tanh"),
         "gate .*: g has 0 features, which do not divide x's 8"),
        (lambda o, x: o.gate(x, o.linear(x, UP), "tanh"),
         "gate .*: g has 16 features, which do not divide x's 8"),
        (lambda o, x: o.gate(x, x, "swish"), "unknown gate 'swish': choose silu"),
        (lambda o, x: o.scale(3, 2.0), "x is 3, not what another op returned"),
        (lambda o, x: o.add(x, Ops().embedding(STEP.tokens, EMBED)), "from another recording"),
        (lambda o, x: o.attention(x, SPEC, STEP),
         r"layer 3: qkv has 8 features, not \(2 \+ 2 \* 1\) \* 4 = 16"),
        (lambda o, x: o.attention(o.linear(x, UP), SPEC, STEP, rope=TABLE),
         "layer 3: rope is given, rotary_dim is 0"),
        (lambda o, x: o.attention(o.linear(x, UP), SPEC, STEP, q_norm=NORM),
         "'layers.3.norm' has 8 values, not 4"),
        (lambda o, x: o.attention(o.linear(x, UP), SPEC, None), "pass on the step itself"),
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
        builder = Builder(19)
        case.build(builder)
        recorded |= {type(op) for op in record(builder.build(1, case.body), 16).steps.ops}
    others = {op.__name__ for op in set(OPS) - recorded}
    assert others == {"Attention", "GatedLinear"}  # a suite of its own; what a pass makes


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
    """By names, with the backends that have it."""
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


@dataclass(frozen=True, eq=False)
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
    names = [op.name for op in prepare(
        with_op(Twice)[0], 128, "numpy", ReferenceBackend().supports
    ).steps.ops]  # fmt: skip
    assert names == ["embedding", "add", "logits"]


def test_a_refusal_comes_before_any_weight_is_read() -> None:
    with pytest.raises(UnsupportedOpError, match="needs the op 'twice'"):
        ReferenceBackend().load(with_op(Thrice)[0], NoWeights(), load_options("f32", {}))  # type: ignore[arg-type]


def test_an_operand_of_another_kind_is_refused() -> None:
    with pytest.raises(OpError, match="an operand comes from another recording"):
        Ops().put(Twice(Value(8), Value(8)))
