"""`recurrence`: a matrix a head in place of a cache, read and written by each token in turn.

The rules are the gated delta rule (arXiv 2412.06464; with a decay for each channel, arXiv
2510.26692) and state space duality (Mamba-2, arXiv 2405.21060). Its test cases are in
`vllmx_testing.state_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.formulas import Floats, NumpyFrame, like, state_before, states_after
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import StepPlan
from vllmx_core.records import Record

W = TypeVar("W")


class RecurrenceSpec(Record):
    """The options of one layer: H heads over Hk key heads of Dk, values of Dv.

    `qkv` (T, 2 * Hk * Dk + H * Dv) is split into q | k | v (of Mamba-2: C | B | x). Head h reads
    key head h // (H / Hk), or h % Hk where they lie `tiled`. With the state S (Dk, Dv) of a head,
    decay and step size d as the rule says, each token in turn does, in float32:

        S = decay * S;  S += k u^T;  out = S^T (scale * q)

    - rule "delta": q and k are divided by their length, x / sqrt(sum(x^2) + norm_eps);
      decay = exp(-exp(a_log) * softplus(a + dt_bias)), one for the head or one for each row of S;
      u = beta * sigmoid(b) * (v - S^T k), S being the decayed one.
    - rule "ssd": dt = softplus(a + dt_bias) within [dt_min, dt_max]; decay = exp(-exp(a_log) * dt),
      one for the head or one for each row of S; u = dt * v; d * v is added to out.
    """

    state: int
    """The number of the state in `ModelShape.states` that holds its (H, Dk, Dv)."""
    num_heads: int  # H
    num_key_heads: int  # Hk
    key_size: int  # Dk
    value_size: int  # Dv
    rule: Literal["delta", "ssd"]
    scale: float = 1.0
    decay: Literal["head", "channel"] = "head"
    """"channel": a decay for each row of S. With the delta rule `a` is (T, H * Dk) and `dt_bias`
    (H * Dk,); with "ssd", as in Mamba 1, `a_log` is (H * Dk,)."""
    tiled: bool = False
    beta: float = 1.0
    """Above 1 a token may turn what the state has for its key into the opposite."""
    norm_eps: float = 1e-6
    dt_min: float = 0.0
    dt_max: float = math.inf

    @property
    def width(self) -> int:
        """Features of qkv."""
        return 2 * self.num_key_heads * self.key_size + self.num_heads * self.value_size

    @property
    def num_decays(self) -> int:
        """Features of a."""
        wide = self.decay == "channel" and self.rule == "delta"
        return self.num_heads * (self.key_size if wide else 1)

    @property
    def num_rates(self) -> int:
        """Values of a_log."""
        wide = self.decay == "channel" and self.rule == "ssd"
        return self.num_heads * (self.key_size if wide else 1)


class RecurrenceWeights(Record, Generic[W]):
    """The weights of a layer, in a backend's own type."""

    a_log: W  # (num_rates,)
    dt_bias: W  # (num_decays,)
    d: W | None = None  # (H,), of rule "ssd"


class TokenInputs(NamedTuple):
    """The numbers that a layer computes of its tokens before they take turns."""

    q: Array  # (T, H, Dk)
    k: Array  # (T, H, Dk)
    v: Array  # (T, H, Dv)
    decay: Array  # (T, H, Dk or 1, 1): what is left of each row of the state
    strength: Array  # (T, H, 1): how much of its value a token writes


class Recurrence(Op):
    """(T, 2 * Hk * Dk + H * Dv) -> (T, H * Dv); see `RecurrenceSpec` and `RecurrenceWeights`."""

    name: ClassVar[str] = "recurrence"
    qkv: Value
    a: Value
    b: Value | None
    spec: RecurrenceSpec
    a_log: WeightRef
    dt_bias: WeightRef
    d: WeightRef | None
    out: Value

    @classmethod
    def of(
        cls,
        qkv: Value,
        a: Value,
        b: Value | None,
        spec: RecurrenceSpec,
        weights: RecurrenceWeights[WeightRef],
        step: StepInputs,
    ) -> Recurrence:
        expect_features(qkv=qkv, a=a)
        if b is not None:
            expect_features(b=b)
        expect(isinstance(step, StepInputs), f"state {spec.state}: pass on the step itself")
        out = Value(spec.num_heads * spec.value_size)
        return cls(qkv, a, b, spec, weights.a_log, weights.dt_bias, weights.d, out)

    def bound(self, get: Callable[[WeightRef], W]) -> RecurrenceWeights[W]:
        """The weights of the op as a backend has them; `get` gives each."""
        d = None if self.d is None else get(self.d)
        return RecurrenceWeights(get(self.a_log), get(self.dt_bias), d)

    def check(self) -> None:
        spec, where = self.spec, f"state {self.spec.state}"
        heads, key_heads, delta = spec.num_heads, spec.num_key_heads, spec.rule == "delta"
        expect(spec.rule in ("delta", "ssd"), f"{where}: unknown rule {spec.rule!r}")
        expect(heads % key_heads == 0, f"{where}: {heads} heads over {key_heads} key heads")
        wanted = f"2 * {key_heads} * {spec.key_size} + {heads} * {spec.value_size} = {spec.width}"
        qkv = f"{where}: qkv has {self.qkv.width} features, not {wanted}"
        expect(self.qkv.width == spec.width, qkv)
        decays = f"{where}: a has {self.a.width} features, not {spec.num_decays}"
        expect(self.a.width == spec.num_decays, decays)
        given = f"{where}: b is {'absent' if self.b is None else 'given'} for rule {spec.rule!r}"
        expect((self.b is not None) == delta, given)
        given = f"{where}: d is {'absent' if self.d is None else 'given'} for rule {spec.rule!r}"
        expect((self.d is None) == delta, given)
        if self.b is not None:
            wide = f"{where}: b has {self.b.width} features, not {heads}"
            expect(self.b.width == heads, wide)
        expect(0 <= spec.dt_min <= spec.dt_max, f"{where}: dt from {spec.dt_min} to {spec.dt_max}")
        expect_vector(self.a_log, spec.num_rates)
        expect_vector(self.dt_bias, spec.num_decays)
        if self.d is not None:
            expect_vector(self.d, heads)

    def compute(self, frame: NumpyFrame) -> None:
        b = None if self.b is None else frame[self.b]
        frame[self.out] = recurrence(
            frame[self.qkv],
            frame[self.a],
            b,
            self.spec,
            self.bound(frame.weight),
            frame.plan,
            frame.states[self.spec.state],
        )


def recurrence(
    qkv: Floats,
    a: Floats,
    b: Floats | None,
    spec: RecurrenceSpec,
    weights: RecurrenceWeights[Floats],
    plan: StepPlan,
    states: Floats,
) -> Floats:
    """(T, 2 * Hk * Dk + H * Dv) -> (T, H * Dv), over and into the states (slots, H, Dk, Dv)."""
    _, targets = plan.state_slots
    q, k, v, decay, strength = prepared(qkv, a, b, spec, weights)
    after = states_after(plan)
    out = np.empty_like(v)  # (T, H, Dv)
    for row in range(plan.num_rows):
        state = state_before(plan, row, states)
        for t in range(int(plan.query_start[row]), int(plan.query_start[row + 1])):
            state = decay[t] * state
            new = v[t]  # (H, Dv)
            if spec.rule == "delta":
                new = new - np.einsum("hkv,hk->hv", state, k[t])
            state = state + k[t, :, :, None] * (strength[t] * new)[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
            if after[t] >= 0:
                states[after[t]] = state
        states[targets[row]] = state
    if weights.d is not None:
        out = out + weights.d[:, None] * v
    return like(qkv, out.reshape(len(qkv), -1))


def prepared(
    qkv: Array,
    a: Array,
    b: Array | None,
    spec: RecurrenceSpec,
    weights: RecurrenceWeights[Any],
    xp: Arrays = NUMPY,
) -> TokenInputs:
    """The inputs of each token's turn."""
    count, qkv = len(qkv), xp.wide(qkv)
    keys, size = spec.num_key_heads * spec.key_size, (spec.num_key_heads, spec.key_size)
    q, k = (part.reshape(count, *size) for part in (qkv[:, :keys], qkv[:, keys : 2 * keys]))
    if spec.rule == "delta":
        q, k = (_unit(part, spec.norm_eps, xp) for part in (q, k))
    q, k = _of_each_head(q, spec, xp) * spec.scale, _of_each_head(k, spec, xp)
    v = qkv[:, 2 * keys :].reshape(count, spec.num_heads, spec.value_size)
    dt = xp.softplus(xp.wide(a) + weights.dt_bias)
    dt = xp.clip(dt, spec.dt_min, spec.dt_max).reshape(count, spec.num_heads, -1)
    decay = xp.exp(-xp.exp(weights.a_log).reshape(spec.num_heads, -1) * dt)
    strength = dt if b is None else xp.sigmoid(xp.wide(b))[..., None] * spec.beta
    return TokenInputs(q, k, v, decay[..., None], strength)


def _unit(x: Array, eps: float, xp: Arrays) -> Array:
    return x / xp.sqrt(xp.square(x).sum(axis=-1, keepdims=True) + eps)


def _of_each_head(x: Array, spec: RecurrenceSpec, xp: Arrays) -> Array:
    """(T, Hk, Dk) -> (T, H, Dk)."""
    shared = spec.num_heads // spec.num_key_heads
    x = x[:, None] if spec.tiled else x[:, :, None]
    shape = (shared, spec.num_key_heads) if spec.tiled else (spec.num_key_heads, shared)
    wide = xp.broadcast_to(x, (len(x), *shape, spec.key_size))
    return wide.reshape(len(x), spec.num_heads, spec.key_size)
