"""Handlers of the ops that do not run by their formula. The residual stream and the results of
norms are float32; matrices, attention and gates work in the model's dtype, and MLX's kernels sum in
float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.experts import Experts, activated
from vllmx_core.ops.head import Head, softcap
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.recorded.op_table import OpTable

from vllmx_metal.arrays import METAL
from vllmx_metal.attention import attention, segment_attention
from vllmx_metal.frame import MetalFrame
from vllmx_metal.latent_attention import latent_attention
from vllmx_metal.matrices import LinearWeight
from vllmx_metal.recurrent import recurrence, short_conv

SORTED_FROM = 64
"""Pairs of token and expert from which on it pays to bring those of an expert together."""
OPS: OpTable[MetalFrame, None] = OpTable("metal", formulas=True)


@OPS.add(Linear)
def _linear(op: Linear, frame: MetalFrame) -> None:
    frame[op.out] = frame.matrix(op.w).multiply(frame[op.x]).astype(frame.dtype)


@OPS.add(Attention)
def _attention(op: Attention, frame: MetalFrame) -> None:
    pages, weights = frame.pages[op.spec.layer], op.bound(frame.vector)
    frame[op.out] = attention(frame[op.qkv], op.spec, weights, frame.step, pages)


@OPS.add(LatentAttention)
def _latent_attention(op: LatentAttention, frame: MetalFrame) -> None:
    frame[op.out] = latent_attention(
        frame[op.q],
        frame[op.latent],
        op.spec,
        frame.vector(op.rope),
        frame.vector(op.norm),
        frame.matrix(op.k_b),
        frame.matrix(op.v_b),
        frame.step,
        frame.pages[op.spec.layer],
    )


@OPS.add(SegmentAttention)
def _segment_attention(op: SegmentAttention, frame: MetalFrame) -> None:
    rope = frame.optional(op.rope)
    frame[op.out] = segment_attention(frame[op.qkv], op.spec, rope, frame.step)


@OPS.add(ShortConv)
def _short_conv(op: ShortConv, frame: MetalFrame) -> None:
    bias, states = frame.optional(op.bias), frame.states[op.spec.state]
    w, step = frame.vector(op.w), frame.state_step
    frame[op.out] = short_conv(frame[op.x], w, bias, op.spec, step, states)


@OPS.add(Recurrence)
def _recurrence(op: Recurrence, frame: MetalFrame) -> None:
    b, states = None if op.b is None else frame[op.b], frame.states[op.spec.state]
    frame[op.out] = recurrence(
        frame[op.qkv],
        frame[op.a],
        b,
        op.spec,
        op.bound(frame.vector),
        frame.state_step,
        states,
        own_kernel=frame.step.kernels.recurrence,
    )


@OPS.add(Experts)
def _experts(op: Experts, frame: MetalFrame) -> None:
    inner = partial(activated, spec=op.spec, xp=METAL)
    ids, weights = frame[op.ids], frame[op.slot_weights]
    gate_up, down = frame.matrix(op.gate_up), frame.matrix(op.down)
    x = frame[op.x]
    here = None
    if op.first is not None:
        here = (ids >= op.first) & (ids < op.first + op.down.count)  # (T, k)
        ids = mx.where(here, ids - op.first, 0)
    frame[op.out] = experts(x, ids, weights, gate_up, down, inner, frame.dtype, here)


@OPS.add(Head)
def _head(op: Head, frame: MetalFrame) -> None:
    rows = frame[op.x][frame.step.logit_rows]
    logits = frame.matrix(op.w).multiply(rows).astype(mx.float32)  # (L, V)
    frame[op.out] = softcap(logits, op.softcap, METAL)


def experts(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    gate_up: LinearWeight,
    down: LinearWeight,
    activated: Callable[[mx.array], mx.array],
    dtype: mx.Dtype,
    here: mx.array | None = None,
) -> mx.array:
    """x (T, E), ids and weights (T, k) -> (T, E) of `dtype`. Slots that are not `here` (T, k) are
    not heard, whatever their expert says."""
    tokens, slots = ids.shape
    chosen, ordered = ids.flatten(), ids.size >= SORTED_FROM
    order = mx.argsort(chosen) if ordered else mx.arange(chosen.size)  # (T * k,)
    chosen = chosen[order]
    rows = x[order // slots][:, None]  # (T * k, 1, E)
    inner = activated(gate_up.multiply_each(rows, chosen, ordered=ordered).astype(dtype))
    said = down.multiply_each(inner, chosen, ordered=ordered).astype(mx.float32)[:, 0]
    if ordered:
        said = said[mx.argsort(order)]
    said = said.reshape(tokens, slots, -1)
    if here is not None:
        said = mx.where(here[..., None], said, 0.0)
    return (said * weights[..., None]).sum(axis=1).astype(dtype)
