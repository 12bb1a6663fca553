"""Every op but attention, each in the smallest model that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

import pytest

from vllmx_core.model import Activation, Array, Ops, StepInputs, Weight
from vllmx_core.testing.harness import VOCAB, Harness
from vllmx_core.testing.plans import Row
from vllmx_core.testing.synthetic import ArraySource, Body, Builder
from vllmx_core.weights import DType

STEPS = [
    [Row([3, 1, 4, 1, 5], 0, [0], "all"), Row([9, 2, 6], 0, [1], "last"), Row([18], 0, [2])],
    [Row([0], 3, [1])],
    [Row(list(range(19)) * 3, 0, [4, 5, 6, 7], "all"), Row([7, 7], 4, [1], "none")],
]
SIZES = [(16, 32), (48, 80), (33, 17), (1, 7), (130, 259)]

Middle = Callable[[Ops, Mapping[str, Weight], Array], Array]


class OpChecks(Harness):
    @pytest.mark.parametrize(("inner", "outer"), SIZES)
    @pytest.mark.parametrize("biased", [False, True])
    def test_linear(self, inner: int, outer: int, biased: bool) -> None:
        builder = Builder(VOCAB)
        builder.linear("up", outer, inner, biases=[0] if biased else [])
        builder.linear("down", inner, outer)

        def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
            return ops.linear(ops.linear(x, w["up"]), w["down"])

        self._compare(builder, inner, middle)

    def test_linear_of_fused_parts_with_some_biases(self) -> None:
        builder = Builder(VOCAB)
        builder.linear("fused", (24, 9, 3), 20, biases=[0, 2])
        builder.linear("down", 20, 36)

        def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
            return ops.linear(ops.linear(x, w["fused"]), w["down"])

        self._compare(builder, 20, middle)

    @pytest.mark.parametrize("dtype", ["bf16", "f16"])
    def test_checkpoint_dtypes_are_exact_in_float32(self, dtype: DType) -> None:
        builder = Builder(VOCAB)
        builder.linear("up", 40, 24, biases=[0])
        builder.linear("down", 24, 40)

        def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
            return ops.linear(ops.linear(x, w["up"]), w["down"])

        self._compare(builder, 24, middle, dtype=dtype)

    @pytest.mark.parametrize("size", [16, 33, 130])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_rms_norms(self, size: int, offset: float) -> None:
        builder = Builder(VOCAB)
        for name in "abc":
            builder.vector(name, size, offset)

        def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
            first, total = ops.add_rms_norm(ops.rms_norm(x, w["a"], 0.3), None, w["b"], 0.1)
            second, total = ops.add_rms_norm(first, total, w["c"], 1e-6)
            return ops.add(second, total)

        self._compare(builder, size, middle)

    @pytest.mark.parametrize("size", [16, 33])
    @pytest.mark.parametrize("biased", [False, True])
    def test_layer_norm(self, size: int, biased: bool) -> None:
        builder = Builder(VOCAB)
        builder.vector("weight", size)
        builder.vector("bias", size, centre=0.5)

        def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
            return ops.layer_norm(x, w["weight"], w["bias"] if biased else None, 0.2)

        self._compare(builder, size, middle)

    @pytest.mark.parametrize("kind", get_args(Activation))
    @pytest.mark.parametrize("size", [16, 33])
    def test_activations(self, kind: Activation, size: int) -> None:
        builder = Builder(VOCAB)
        builder.linear("gate_up", (size, size), size)

        def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
            x = ops.scale(x, 4.0)  # far into both tails
            return ops.add(
                ops.activation(x, kind), ops.gated_act(ops.linear(x, w["gate_up"]), kind)
            )

        self._compare(builder, size, middle)

    def test_add_keeps_both_inputs(self) -> None:
        builder = Builder(VOCAB)
        builder.linear("square", 24, 24)

        def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
            y = ops.linear(x, w["square"])
            total = ops.add(x, y)
            return ops.add(ops.scale(total, -0.75), ops.add(y, ops.scale(x, 0.5)))

        self._compare(builder, 24, middle)

    @pytest.mark.parametrize("softcap", [None, 2.5])
    @pytest.mark.parametrize("tied", [False, True])
    def test_logits(self, softcap: float | None, tied: bool) -> None:
        builder = Builder(VOCAB)
        builder.embedding("embed", 24)
        if tied:
            builder.tied("head", "embed", 24)
        else:
            builder.linear("head", VOCAB, 24, biases=[0])

        def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
            x = ops.embedding(step.tokens, w["embed"])
            return ops.logits(x, step.logit_rows, w["head"], softcap)

        self._run(builder, 24, body, "f32")

    def _compare(self, builder: Builder, size: int, middle: Middle, dtype: DType = "f32") -> None:
        """Embedding, the ops under test on (T, size), head."""
        builder.embedding("embed", size)
        builder.linear("head", VOCAB, size)

        def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
            x = middle(ops, w, ops.embedding(step.tokens, w["embed"]))
            return ops.logits(x, step.logit_rows, w["head"])

        self._run(builder, size, body, dtype)

    def _run(self, builder: Builder, size: int, body: Body, dtype: DType) -> None:
        source = ArraySource(builder.arrays, dtype)
        self.compare(builder.build(size, body), source, STEPS)
