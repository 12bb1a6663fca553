"""`short_conv`: each channel over its last few tokens, causal and depthwise.

Its test cases cover slots and steps as well as the formula: `vllmx_testing.state_checks`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from vllmx_core.ops.activation import activation
from vllmx_core.ops.formulas import Floats, NumpyFrame, like, state_before, states_after
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import StepPlan
from vllmx_core.records import Record


class ShortConvSpec(Record):
    """The options of one convolution over C channels."""

    state: int
    """The number of the state in `ModelShape.states` that holds its (1, K - 1, C) taps: the
    channels of the K - 1 tokens before, the oldest first."""
    kernel: int  # K
    activation: Literal["silu"] | None = None


class ShortConv(Op):
    """y[t, c] = act(bias[c] + the sum over i < K, in this order, of w[c, i] * x[t - K + 1 + i, c]),
    in float32. Tokens of the row before this step come out of its state, zeros before its first.
    `w` is a vector (C * K,), the K weights of each channel together."""

    name: ClassVar[str] = "short_conv"
    x: Value
    spec: ShortConvSpec
    w: WeightRef  # (C * K,): the K weights of each channel, that of the newest token last
    bias: WeightRef | None  # (C,)
    out: Value

    @classmethod
    def of(
        cls,
        x: Value,
        w: WeightRef,
        spec: ShortConvSpec,
        step: StepInputs,
        bias: WeightRef | None = None,
    ) -> ShortConv:
        expect_features(x=x)
        expect(isinstance(step, StepInputs), f"state {spec.state}: pass on the step itself")
        return cls(x, spec, w, bias, Value(x.width))

    def check(self) -> None:
        spec = self.spec
        expect(spec.kernel >= 2, f"state {spec.state}: kernel is {spec.kernel}, it must be above 1")
        kinds = spec.activation in (None, "silu")
        expect(kinds, f"unknown activation {spec.activation!r}: choose 'silu' or None")
        expect_vector(self.w, self.x.width * spec.kernel)
        if self.bias is not None:
            expect_vector(self.bias, self.x.width)

    def compute(self, frame: NumpyFrame) -> None:
        bias = None if self.bias is None else frame.weight(self.bias)
        frame[self.out] = short_conv(
            frame[self.x],
            frame.weight(self.w),
            bias,
            self.spec,
            frame.plan,
            frame.states[self.spec.state],
        )


def short_conv(
    x: Floats,
    w: Floats,
    bias: Floats | None,
    spec: ShortConvSpec,
    plan: StepPlan,
    states: Floats,
) -> Floats:
    """(T, C) -> (T, C), over and into the states (slots, 1, K - 1, C)."""
    _, targets = plan.state_slots
    taps, out = w.reshape(-1, spec.kernel), np.empty_like(x)  # (C, K)
    after = states_after(plan)
    for row in range(plan.num_rows):
        tokens = slice(int(plan.query_start[row]), int(plan.query_start[row + 1]))
        count = tokens.stop - tokens.start
        seen = np.concatenate([state_before(plan, row, states)[0], x[tokens]])  # (K - 1 + n, C)
        total = np.zeros_like(seen[:count]) + (0 if bias is None else bias)
        for tap in range(spec.kernel):
            total = total + seen[tap : tap + count] * taps[:, tap]
        out[tokens] = total if spec.activation is None else activation(total, spec.activation)
        states[targets[row], 0] = seen[count:]
        for index, slot in enumerate(after[tokens].tolist(), 1):
            if slot >= 0:
                states[slot, 0] = seen[index : index + spec.kernel - 1]
    return like(x, out)
