"""Recurrent layers in MLX's own ops: all rows of a step side by side, token after token; or, where
it is chosen, by the kernel of `recurrence_kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from vllmx_core.cache.state_rows import StateRows, conv_windows
from vllmx_core.model import StateSpec
from vllmx_core.ops.recurrence import RecurrenceSpec, RecurrenceWeights, TokenInputs, prepared
from vllmx_core.ops.short_conv import ShortConvSpec
from vllmx_core.plan import AnyArray, StepPlan

from vllmx_metal.arrays import METAL
from vllmx_metal.recurrence_kernel import Rows, run


@dataclass(slots=True)
class States:
    """The states of one recurrent layer, as the last step that was built leaves them."""

    data: mx.array  # (slots, heads, rows, cols) float32

    def before(self, source: mx.array) -> mx.array:
        """(R, heads, rows, cols) in these slots; zeros where a row begins (-1)."""
        found = mx.take(self.data, mx.maximum(source, 0), axis=0)
        return mx.where((source < 0)[:, None, None, None], 0.0, found)


def allocate_states(specs: Sequence[StateSpec], slots: int) -> tuple[States, ...]:
    """Zeroed slots of each recurrent layer."""
    return tuple(States(mx.zeros((slots, one.heads, one.rows, one.cols))) for one in specs)


@dataclass(slots=True)
class StateStep:
    """The rows of a step and where their states are, for all layers."""

    plan: StepPlan
    rows: StateRows
    on_device: Rows
    """The same, the longest row first."""
    target: mx.array  # (R + M,) slots of the states behind rows, then of `StateRows.keeping`
    _windows: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: StepPlan) -> StateStep:
        """The rows of a step."""
        rows = StateRows.of(plan)
        target = np.concatenate([rows.target, rows.after[rows.keeping]])
        return cls(plan, rows, on_device(rows), _indices(target))

    def windows(self, kernel: int) -> tuple[mx.array, mx.array]:
        """See `conv_windows`."""
        if kernel not in self._windows:
            read, kept = conv_windows(self.plan, self.rows, kernel)
            self._windows[kernel] = _indices(read), _indices(kept)
        return self._windows[kernel]


def short_conv(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None,
    spec: ShortConvSpec,
    step: StateStep,
    states: States,
) -> mx.array:
    """(T, C) -> (T, C), over and into the states (slots, 1, K - 1, C)."""
    kept = states.before(step.on_device.source).reshape(-1, x.shape[1])  # (R * (K - 1), C)
    seen = mx.concatenate([kept, x.astype(mx.float32)])
    windows, left = step.windows(spec.kernel)
    out = (seen[windows] * w.reshape(-1, spec.kernel).T).sum(axis=1)  # (T, C)
    states.data[step.target] = seen[left][:, None]
    out = out if bias is None else out + bias
    out = out * mx.sigmoid(out) if spec.activation else out
    return out.astype(x.dtype)


def recurrence(
    qkv: mx.array,
    a: mx.array,
    b: mx.array | None,
    spec: RecurrenceSpec,
    weights: RecurrenceWeights[mx.array],
    step: StateStep,
    states: States,
    *,
    own_kernel: bool = False,
) -> mx.array:
    """(T, 2 * Hk * Dk + H * Dv) -> (T, H * Dv), over and into the states (slots, H, Dk, Dv)."""
    tokens, delta = prepared(qkv, a, b, spec, weights, METAL), spec.rule == "delta"
    if own_kernel:
        found, left = run(tokens, step.on_device, states.data, delta=delta)
    else:
        state = states.before(step.on_device.source)  # (R, H, Dk, Dv), the longest row first
        found, left = side_by_side(tokens, step.rows, state, delta=delta)
    states.data[step.target] = left
    if weights.d is not None:
        found = found + weights.d[:, None] * tokens.v
    return found.reshape(len(qkv), -1).astype(qkv.dtype)


def side_by_side(
    tokens: TokenInputs, rows: StateRows, state: mx.array, *, delta: bool
) -> tuple[mx.array, mx.array]:
    """(T, H, Dv), and the states (R + M, H, Dk, Dv) behind the rows, in the order of `rows`, and
    behind the tokens of `keeping`."""
    ended, outs, order = [], [], []
    kept: dict[int, mx.array] = {}
    for index in rows.tokens():
        if len(index) < len(state):
            ended.append(state[len(index) :])
            state = state[: len(index)]
        state, out = _one_token(state, tokens, _indices(index), delta=delta)
        outs.append(out)
        order.append(index)
        for place in np.flatnonzero(rows.after[index] >= 0).tolist():
            kept[int(index[place])] = state[place : place + 1]
    found = mx.concatenate(outs)[_indices(np.argsort(np.concatenate(order)))]
    behind = [kept[token] for token in rows.keeping.tolist()]
    return found, mx.concatenate([state, *reversed(ended), *behind])


def _one_token(
    state: mx.array, tokens: TokenInputs, at: mx.array, *, delta: bool
) -> tuple[mx.array, mx.array]:
    """One token of each of n rows: states (n, H, Dk, Dv) behind it, and answers (n, H, Dv)."""
    k, v, state = tokens.k[at], tokens.v[at], state * tokens.decay[at]
    if delta:
        v = v - (k[:, :, None] @ state)[:, :, 0]
    state = state + k[..., None] * (tokens.strength[at] * v)[:, :, None]
    return state, (tokens.q[at][:, :, None] @ state)[:, :, 0]


def on_device(rows: StateRows) -> Rows:
    """The rows as the kernel takes them."""
    lengths, keeping = np.array(rows.lengths), rows.keeping
    left_at = np.full_like(rows.after, -1)
    left_at[rows.first + lengths - 1] = np.arange(len(lengths))
    left_at[keeping] = len(lengths) + np.arange(len(keeping))
    source, first, counts, places = map(_indices, (rows.source, rows.first, lengths, left_at))
    return Rows(source, first, counts, places, len(lengths) + len(keeping))


def _indices(array: AnyArray) -> mx.array:
    return mx.array(array.astype(np.int32))
