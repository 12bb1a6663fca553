"""An op of a plugin, written once over `frame.xp`, on every backend whose arrays speak NumPy's
language; others refuse it by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.ops.op import ArrayOp, expect_rows, expect_vector
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value, WeightRef
from vllmx_testing.harness import load_options
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

from tests.usable_backends import backend_spec

TOKENS = [3, 1, 4]


class Softsign(ArrayOp):
    """x / (1 + |x|) * w."""

    name: ClassVar[str] = "softsign"
    x: Value
    w: WeightRef
    out: Value

    def check(self) -> None:
        expect_rows(x=self.x)
        expect_vector(self.w, self.x.width)

    def compute(self, frame: ArrayFrame[Any]) -> None:
        x, xp = frame.xp.wide(frame[self.x]), frame.xp
        frame[self.out] = xp.like(frame[self.x], x / (1 + xp.abs(x)) * frame.vector(self.w))


def model() -> tuple[SyntheticModel, dict[str, Any]]:
    """A model with the op, and its weights."""
    builder = Builder(19)
    builder.embedding("embed", 8)
    builder.vector("w", 8)
    builder.linear("head", 19, 8)

    def body(ops: Ops, w: Mapping[str, WeightRef], step: StepInputs) -> Value:
        x = ops.embedding(step.tokens, w["embed"])
        x = ops.put(Softsign(x, w["w"], Value(x.width))).out
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(8, body), builder.arrays


@pytest.mark.parametrize("backend", ["numpy", "torch", "metal"])
def test_one_formula_runs_on_every_library(backend: str) -> None:
    made, arrays = model()
    loaded = backend_spec(backend).load()().load(made, ArraySource(arrays), load_options("f32", {}))
    plan = make_plan([Row(TOKENS, 0, [0], "all")], 16)
    whole = np.arange(len(TOKENS), dtype=np.int32)
    rows = sampling_rows(len(TOKENS), num_logprobs=[0] * len(TOKENS), whole=whole)
    found = loaded.step(plan, rows).result().logits
    loaded.close()
    embed, w, head = (arrays[f"{name}.weight"] for name in ("embed", "w", "head.0"))
    x = embed[TOKENS].astype(np.float64)
    expected = x / (1 + np.abs(x)) * w @ head.T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_backend_with_kernels_of_its_own_refuses_it() -> None:
    made, arrays = model()
    with pytest.raises(UnsupportedOpError, match="softsign"):
        backend_spec("cpu").load()().load(made, ArraySource(arrays), load_options("f32", {}))
