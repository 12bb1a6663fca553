"""Mistakes in recurrent layers, in pooling and in attention within segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from vllmx_core.ops.attention import attend
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.op import Op
from vllmx_core.ops.pool import Pool
from vllmx_core.ops.recurrence import Recurrence, recurrence
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16
from vllmx_testing.state_checks import CONVS, DELTA, SSD

from .planted import Change, Suite, broken_op, method, op_case


def with_plan(kind: type[Op], **changes: Callable[[Any], Any]) -> Change:
    """An op that takes arrays of the step for what they are not."""

    def compute(op: Op, frame: NumpyFrame) -> None:
        plan = frame.plan
        made = {name: change(getattr(plan, name)) for name, change in changes.items()}
        frame.plan = replace(plan, **made)
        op.compute(frame)
        frame.plan = plan

    return broken_op(kind, compute)


def with_options(kind: type[Op], **changes: Any) -> Change:
    """An op with another `spec`."""
    return broken_op(
        kind, lambda op, frame: replace(op, spec=replace(op.spec, **changes)).compute(frame)
    )


def with_states(kind: type[Op], change: Callable[[Any], Any]) -> Change:
    """A recurrent layer that finds other states than it left."""

    def compute(op: Any, frame: NumpyFrame) -> None:
        states = frame.states[op.spec.state]
        states[:] = change(states)
        op.compute(frame)

    return broken_op(kind, compute)


def with_inputs(change: Callable[..., tuple[Any, Any, Any]]) -> Change:
    """A recurrence with `change(op, a, b, weights)` in place of a, b and its weights."""

    def compute(op: Recurrence, frame: NumpyFrame) -> None:
        b = None if op.b is None else frame[op.b]
        a, b, weights = change(op, frame[op.a], b, op.bound(frame.weight))
        states = frame.states[op.spec.state]
        frame[op.out] = recurrence(frame[op.qkv], a, b, op.spec, weights, frame.plan, states)

    return broken_op(Recurrence, compute)


def _one_later(after: Any) -> Any:
    return None if after is None else _rolled(after)


def _writes_what_it_read(op: Recurrence, frame: NumpyFrame) -> None:
    """A slot that a row leaves behind is a snapshot: nobody may write it."""
    op.compute(frame)
    plan, states = frame.plan, frame.states[op.spec.state]
    assert plan.state_from is not None
    assert plan.state_to is not None
    kept = plan.state_from >= 0
    states[plan.state_from[kept]] = states[plan.state_to[kept]]


def _causal(op: SegmentAttention, frame: NumpyFrame) -> None:
    spec, plan, qkv = op.spec.attention, frame.plan, frame[op.qkv]
    heads = qkv.reshape(len(qkv), -1, spec.head_size)
    q, k, v = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)
    out = np.empty_like(q)
    for row in range(plan.num_rows):
        tokens = slice(int(plan.query_start[row]), int(plan.query_start[row + 1]))
        size = tokens.stop - tokens.start
        out[tokens] = attend(q[tokens], k[tokens], v[tokens], np.tri(size, dtype=bool), spec)
    frame[op.out] = out.reshape(len(qkv), -1)


def _of_bf16(states: Any) -> Any:
    return bf16_to_f32(f32_to_bf16(states.astype(np.float32)))


def _rolled(array: Any) -> Any:
    return np.roll(array, 1, axis=0)


def _first_channel(op: Recurrence, a: Any, b: Any, weights: Any) -> tuple[Any, Any, Any]:
    size = op.spec.key_size
    return np.repeat(a[:, ::size], size, axis=1), b, weights


def _first_rate(op: Recurrence, a: Any, b: Any, weights: Any) -> tuple[Any, Any, Any]:
    size = op.spec.key_size
    return a, b, replace(weights, a_log=np.repeat(weights.a_log[::size], size))


def pooled_as(kind: Any) -> Change:
    return broken_op(Pool, lambda op, frame: replace(op, kind=kind).compute(frame))


def short_conv(features: str) -> Callable[[Suite], None]:
    return method("test_short_conv", CONVS[features])


def recurrent(rule: str) -> Callable[[Suite], None]:
    return method("test_recurrence", rule)


SEGMENTS = "segment_attention: four heads"
STATES_AND_VECTORS: dict[str, tuple[Change, Callable[[Suite], None]]] = {
    "taps of another slot": (with_states(ShortConv, _rolled), short_conv("plain")),
    "taps the other way round": (
        with_states(ShortConv, lambda taps: taps[:, :, ::-1].copy()), short_conv("plain")
    ),
    "taps forgotten": (with_states(ShortConv, np.zeros_like), short_conv("kernel of 2")),
    "activation of a convolution ignored": (
        with_options(ShortConv, activation=None), short_conv("silu")
    ),
    "bias of a convolution ignored": (
        broken_op(ShortConv, lambda op, frame: replace(op, bias=None).compute(frame)),
        short_conv("kernel of 3, biased"),
    ),
    "states of another slot": (with_states(Recurrence, _rolled), recurrent("delta")),
    "states forgotten": (with_states(Recurrence, np.zeros_like), recurrent("ssd")),
    "states in bf16": (with_states(Recurrence, _of_bf16), recurrent("delta")),
    "states left in another slot": (
        with_plan(Recurrence, state_to=_rolled), recurrent("delta")
    ),
    "taps kept after another token": (
        with_plan(ShortConv, state_after=_one_later),
        method("test_states_are_kept_after_each_token", DELTA),
    ),
    "states kept after another token": (
        with_plan(Recurrence, state_after=_one_later),
        method("test_states_are_kept_after_each_token", SSD),
    ),
    "rows that begin read their slot": (
        with_plan(Recurrence, state_from=lambda slots: np.where(slots < 0, 3, slots)),
        method("test_rows_that_begin_do_not_read_their_slot"),
    ),
    "a snapshot is written": (
        broken_op(Recurrence, _writes_what_it_read),
        method("test_states_are_kept_and_handed_on"),
    ),
    "heads grouped that lie tiled": (
        with_options(Recurrence, tiled=False), recurrent("delta, tiled")
    ),
    "eps of lengths ignored": (
        with_options(Recurrence, norm_eps=1e-6), recurrent("delta, norm eps")
    ),
    "queries not scaled": (with_options(Recurrence, scale=1.0), recurrent("delta")),
    "limits of step sizes ignored": (
        with_options(Recurrence, dt_min=0.0, dt_max=np.inf), recurrent("ssd, limits")
    ),
    "strength ignored": (
        with_inputs(lambda op, a, b, weights: (a, np.zeros_like(b), weights)), recurrent("delta")
    ),
    "one decay for all channels": (
        with_inputs(_first_channel), recurrent("delta, a decay a channel")
    ),
    "one rate for all rows of a state": (
        with_inputs(_first_rate), recurrent("ssd, a decay a channel")
    ),
    "bias of step sizes ignored": (
        with_inputs(lambda op, a, b, weights: (
            a, b, replace(weights, dt_bias=np.zeros_like(weights.dt_bias))
        )),
        recurrent("ssd"),
    ),
    "d ignored": (
        with_inputs(lambda op, a, b, weights: (a, b, replace(weights, d=None))), recurrent("ssd")
    ),
    "the last token for the mean": (pooled_as("last"), op_case("pool: mean, width 33")),
    "the first token for the last": (pooled_as("cls"), op_case("pool: last, width 33")),
    "the last token for the first": (pooled_as("last"), op_case("pool: cls, width 33")),
    "the token of another text": (
        with_plan(Pool, logit_rows=_rolled), op_case("pool: last, width 33")
    ),
    "segments that see no later token": (
        broken_op(SegmentAttention, _causal), op_case(SEGMENTS)
    ),
    "segments that run together": (
        with_plan(
            SegmentAttention, query_start=lambda starts: starts[[0, -1]],
            context_len=lambda lengths: lengths[:1],
        ),
        op_case(SEGMENTS),
    ),
    "scale of segments ignored": (with_options(SegmentAttention, scale=1.0), op_case(SEGMENTS)),
    "window of segments ignored": (
        with_options(SegmentAttention, window=None), op_case("segment_attention: a window")
    ),
    "window of segments off by one": (
        with_options(SegmentAttention, window=4), op_case("segment_attention: a window")
    ),
    "wrong pairs in segments": (
        with_options(SegmentAttention, interleaved=False),
        op_case("segment_attention: one kv head, pairs rotated"),
    ),
}  # fmt: skip
