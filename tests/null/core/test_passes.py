"""Passes, each on a recorded step of its own."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import StepPlan
from vllmx_core.recorded.passes import (
    expand_unsupported,
    fuse_activations,
    fuse_gated_linears,
    gated_weights,
    read_at_once,
    unsupported_ops,
)
from vllmx_core.recorded.recording import record
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_testing.harness import load_options
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource, Builder, tiny_decoder

EMBED, HEAD = WeightRef("embed", "embedding", 50, 8), WeightRef("head", "linear", 50, 8)
GATE_UP, OTHER = (WeightRef(name, "linear", 32, 8) for name in ("gate_up", "other"))
BACK = WeightRef("back", "linear", 8, 32)
DOWN, NORM = WeightRef("down", "linear", 8, 16), WeightRef("norm", "vector", 8)
STEP = StepInputs()


def mlp(ops: Ops, x: Value, weight: WeightRef = GATE_UP) -> Value:
    return ops.linear(ops.gated_act(ops.linear(x, weight), "silu"), DOWN)


def finished(ops: Ops, x: Value) -> OpList:
    return ops.finished(ops.logits(x, STEP.logit_rows, HEAD), 50)


def types(steps: OpList) -> list[str]:
    return [type(op).__name__ for op in steps.ops]


def test_a_gate_moves_into_its_linear() -> None:
    ops = Ops()
    steps = finished(ops, mlp(ops, mlp(ops, ops.embedding(STEP.tokens, EMBED))))
    assert gated_weights(steps) == {"gate_up"}
    fused = fuse_gated_linears(steps, gated_weights(steps))
    assert types(fused) == ["Embedding", *["GatedLinear", "Linear"] * 2, "Head"]
    first, second = fused.ops[1:3]
    assert isinstance(first, GatedLinear)
    assert first.kind == "silu"
    assert first.out.width == 16
    assert second.reads == first.writes


def test_a_product_that_is_read_twice_keeps_its_place() -> None:
    ops = Ops()
    x = ops.embedding(STEP.tokens, EMBED)
    product = ops.linear(x, GATE_UP)
    ops.gated_act(product, "silu")
    ops.scale(product, 2.0)
    steps = finished(ops, x)
    assert gated_weights(steps) == frozenset()
    assert fuse_gated_linears(steps, gated_weights(steps)) == steps


def test_a_weight_with_another_use_keeps_its_layout() -> None:
    ops = Ops()
    x = ops.embedding(STEP.tokens, EMBED)
    mlp(ops, x)
    mlp(ops, x, OTHER)
    ops.scale(ops.linear(x, GATE_UP), 2.0)
    steps = finished(ops, x)
    assert gated_weights(steps) == {"other"}
    assert types(fuse_gated_linears(steps, gated_weights(steps))).count("GatedAct") == 1


def test_an_activation_moves_into_its_linear() -> None:
    ops = Ops()
    x = ops.embedding(STEP.tokens, EMBED)
    hidden = ops.activation(ops.linear(x, OTHER), "gelu")
    apart = ops.activation(ops.linear(hidden, WeightRef("tanh", "linear", 16, 32)), "tanh")
    steps = finished(ops, ops.linear(apart, DOWN))
    fused = fuse_activations(steps)
    assert types(fused) == ["Embedding", "Linear", "Linear", "Act", "Linear", "Head"]
    linears = [op for op in fused.ops if isinstance(op, Linear)]
    assert [op.activation for op in linears] == ["gelu", None, None]
    assert linears[1].x is linears[0].out


def test_a_product_that_is_read_beside_its_activation_stays() -> None:
    ops = Ops()
    x = ops.embedding(STEP.tokens, EMBED)
    product = ops.linear(x, OTHER)
    steps = finished(ops, ops.linear(ops.add(ops.activation(product, "silu"), product), BACK))
    assert fuse_activations(steps) == steps


def test_ops_that_a_backend_lacks_become_others() -> None:
    ops = Ops()
    x = ops.embedding(STEP.tokens, EMBED)
    normed, total = ops.add_rms_norm(x, x, NORM, 0.1)
    steps = finished(ops, ops.add(normed, total))

    def supports(op: Op) -> bool:
        return not isinstance(op, AddRmsNorm)

    expanded = expand_unsupported(steps, supports)
    assert types(expanded) == ["Embedding", "Add", "RmsNorm", "Add", "Head"]
    add, norm = expanded.ops[1:3]
    assert isinstance(add, Add)
    assert isinstance(norm, RmsNorm)
    assert (norm.x, norm.out) == (total, normed)
    assert not unsupported_ops(steps, supports)
    assert expand_unsupported(steps, lambda op: True) == steps


def test_an_op_whose_parts_are_lacking_stays_for_the_refusal() -> None:
    ops = Ops()
    gated = fuse_gated_linears(
        finished(ops, mlp(ops, ops.embedding(STEP.tokens, EMBED))), ["gate_up"]
    )

    def supports(op: Op) -> bool:
        return not isinstance(op, GatedLinear | GatedAct)

    assert expand_unsupported(gated, supports) == gated
    assert [type(op) for op in unsupported_ops(gated, supports)] == [GatedLinear]


def test_values_that_the_next_op_alone_reads() -> None:
    ops = Ops()
    x = ops.embedding(STEP.tokens, EMBED)
    once = ops.rms_norm(x, NORM, 0.1)
    product = ops.linear(once, WeightRef("square", "linear", 8, 8))
    twice = ops.rms_norm(product, NORM, 0.1)
    steps = finished(ops, ops.add(twice, twice))
    found = [(type(one).__name__, type(two).__name__) for one, two in read_at_once(steps)]
    assert found == [
        ("Embedding", "RmsNorm"),
        ("RmsNorm", "Linear"),
        ("Linear", "RmsNorm"),
        ("Add", "Head"),
    ]


def logits(steps: OpList | None) -> object:
    """The logits of a tiny decoder in float64, with these steps in place of its own."""
    builder = Builder(19)
    model = tiny_decoder(builder)
    loaded = ReferenceBackend().load(model, ArraySource(builder.arrays), load_options("f64", {}))
    if steps is not None:
        loaded = type(loaded)(steps, loaded._weights, loaded._pages, (), loaded.info)
    plan: StepPlan = make_plan([Row([3, 1, 4, 1, 5], 0, [0], "all")], 16)
    return loaded.logits(plan)


@pytest.mark.parametrize("expanded", [GatedLinear, AddRmsNorm])
def test_fusing_and_expanding_change_no_bit_of_the_formulas(expanded: type[Op]) -> None:
    steps = record(tiny_decoder(Builder(19)), 128).steps
    fused = fuse_gated_linears(steps, gated_weights(steps))
    assert types(fused).count("GatedLinear") == 2
    other = expand_unsupported(fused, lambda op: not isinstance(op, expanded))
    assert expanded.__name__ not in types(other)
    np.testing.assert_array_equal(logits(fused), logits(None))
    np.testing.assert_array_equal(logits(other), logits(None))


def test_a_pass_in_front_of_a_backend_may_put_ops_in() -> None:
    """The pass puts something behind each linear, which an adapter would do."""

    def doubled(steps: OpList) -> OpList:
        found: list[Op] = []
        for op in steps.ops:
            if not isinstance(op, Linear):
                found.append(op)
                continue
            half = Value(op.out.width)
            found += [Linear(op.x, op.w, half), Add(half, half, op.out)]
        return OpList(tuple(found), steps.logits)

    plain = record(tiny_decoder(Builder(19)), 128)
    passed = record(tiny_decoder(Builder(19)), 128, [doubled])
    assert types(passed.steps).count("Add") == types(plain.steps).count("Linear") == 8
    assert np.abs(np.subtract(logits(passed.steps), logits(None))).max() > 0.1
