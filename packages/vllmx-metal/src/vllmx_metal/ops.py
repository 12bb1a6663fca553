"""The ops on MLX arrays, one handler each. The residual stream and what norms make of it are
float32; matrices, attention and gates work in the model's dtype, and MLX's kernels sum in
float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from vllmx_core.ops.activation import Act
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.clip import Clip
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.gate import Gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head import Head
from vllmx_core.ops.head_norm import HeadNorm, HeadNormSpec
from vllmx_core.ops.keep import Keep
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.layer_norm import LayerNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.merge import Merge
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.patches import Patches, patches_in
from vllmx_core.ops.place import Place
from vllmx_core.ops.pool import Pool
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.recv import Recv
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.route import Route
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.send import Send
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.ops.vocab_embedding import VocabEmbedding
from vllmx_core.recorded.op_table import OpTable

from vllmx_metal.activations import ACTIVATIONS, GATES, OPENINGS, UNGATED
from vllmx_metal.attention import attention
from vllmx_metal.experts import clamped, experts, route
from vllmx_metal.frame import MetalFrame
from vllmx_metal.latent_attention import latent_attention
from vllmx_metal.recurrent import recurrence, short_conv
from vllmx_metal.segment_attention import segment_attention

OPS: OpTable[MetalFrame, None] = OpTable("metal")


@OPS.add(Embedding)
def _embedding(op: Embedding, frame: MetalFrame) -> None:
    ids: mx.array = getattr(frame.step, op.ids.source)
    if op.ids.source == "token_types":
        ids = mx.minimum(ids, op.w.rows - 1)
    frame[op.out] = frame.table(op.w).rows(ids + op.offset).astype(mx.float32)


@OPS.add(RmsNorm)
def _rms_norm(op: RmsNorm, frame: MetalFrame) -> None:
    frame[op.out] = mx.fast.rms_norm(frame[op.x], frame.array(op.w), op.eps)


@OPS.add(AddRmsNorm)
def _add_rms_norm(op: AddRmsNorm, frame: MetalFrame) -> None:
    total = frame[op.x] + frame[op.residual]
    frame[op.out], frame[op.total] = mx.fast.rms_norm(total, frame.array(op.w), op.eps), total


@OPS.add(LayerNorm)
def _layer_norm(op: LayerNorm, frame: MetalFrame) -> None:
    bias = None if op.bias is None else frame.array(op.bias)
    frame[op.out] = mx.fast.layer_norm(frame[op.x], frame.array(op.w), bias, op.eps)


@OPS.add(HeadNorm)
def _head_norm(op: HeadNorm, frame: MetalFrame) -> None:
    spec, size = op.spec, op.spec.head_size
    ends = [spec.num_heads * size, (spec.num_heads + spec.num_kv_heads) * size]
    q, k, v = mx.split(frame[op.qkv], ends, axis=-1)
    if op.q_norm is not None:
        q = _normed_heads(q, frame.array(op.q_norm), spec)
    if op.k_norm is not None:
        k = _normed_heads(k, frame.array(op.k_norm), spec)
    if spec.values:
        heads = v.reshape(len(v), -1, size)
        v = mx.fast.rms_norm(heads, None, spec.eps).reshape(v.shape)
    frame[op.out] = mx.concatenate([q, k, v], axis=-1)


def _normed_heads(x: mx.array, w: mx.array, spec: HeadNormSpec) -> mx.array:
    """(T, heads * D) -> the same."""
    runs = x.astype(mx.float32).reshape(len(x), -1, x.shape[-1] if spec.across else spec.head_size)
    if spec.kind == "rms":
        normed = mx.fast.rms_norm(runs, None, spec.eps)
    else:
        normed = mx.fast.layer_norm(runs, None, None, spec.eps)
    return (normed * w.reshape(runs.shape[1:])).reshape(x.shape).astype(x.dtype)


@OPS.add(Linear)
def _linear(op: Linear, frame: MetalFrame) -> None:
    frame[op.out] = frame.matrix(op.w).multiply(frame[op.x]).astype(frame.dtype)


@OPS.add(Attention)
def _attention(op: Attention, frame: MetalFrame) -> None:
    pages, weights = frame.pages[op.spec.layer], op.bound(frame.array)
    frame[op.out] = attention(frame[op.qkv], op.spec, weights, frame.step, pages)


@OPS.add(LatentAttention)
def _latent_attention(op: LatentAttention, frame: MetalFrame) -> None:
    frame[op.out] = latent_attention(
        frame[op.q],
        frame[op.latent],
        op.spec,
        frame.array(op.rope),
        frame.array(op.norm),
        frame.matrix(op.k_b),
        frame.matrix(op.v_b),
        frame.step,
        frame.pages[op.spec.layer],
    )


@OPS.add(SegmentAttention)
def _segment_attention(op: SegmentAttention, frame: MetalFrame) -> None:
    rope = None if op.rope is None else frame.array(op.rope)
    frame[op.out] = segment_attention(frame[op.qkv], op.spec, rope, frame.step)


@OPS.add(ShortConv)
def _short_conv(op: ShortConv, frame: MetalFrame) -> None:
    bias, states = None if op.bias is None else frame.array(op.bias), frame.states[op.spec.state]
    w, step = frame.array(op.w), frame.state_step
    frame[op.out] = short_conv(frame[op.x], w, bias, op.spec, step, states)


@OPS.add(Recurrence)
def _recurrence(op: Recurrence, frame: MetalFrame) -> None:
    b, states = None if op.b is None else frame[op.b], frame.states[op.spec.state]
    frame[op.out] = recurrence(
        frame[op.qkv],
        frame[op.a],
        b,
        op.spec,
        op.bound(frame.array),
        frame.state_step,
        states,
        own_kernel=frame.step.kernels.recurrence,
    )


@OPS.add(GatedAct)
def _gated_act(op: GatedAct, frame: MetalFrame) -> None:
    gate, up = mx.split(frame[op.gate_up], 2, axis=-1)
    frame[op.out] = GATES[op.kind](gate, up)


@OPS.add(Act)
def _activation(op: Act, frame: MetalFrame) -> None:
    function = mx.tanh if op.kind == "tanh" else ACTIVATIONS[op.kind]
    frame[op.out] = function(frame[op.x])


@OPS.add(Add)
def _add(op: Add, frame: MetalFrame) -> None:
    frame[op.out] = frame[op.x] + frame[op.y]


@OPS.add(Scale)
def _scale(op: Scale, frame: MetalFrame) -> None:
    frame[op.out] = frame[op.x] * op.factor


@OPS.add(ScaleBy)
def _scale_by(op: ScaleBy, frame: MetalFrame) -> None:
    x, w = frame[op.x], frame.array(op.w)
    scaled = x.reshape(-1, op.w.rows, op.span) * w[:, None]
    frame[op.out] = scaled.reshape(x.shape).astype(x.dtype)


@OPS.add(Clip)
def _clip(op: Clip, frame: MetalFrame) -> None:
    low, high = frame.array(op.bounds).reshape(-1, 2).T
    parts = [
        mx.minimum(mx.maximum(frame[x], low[index]), high[index]).astype(frame.dtype)
        for index, x in enumerate(op.reads)
    ]
    frame[op.out] = mx.concatenate(parts, axis=-1)


@OPS.add(Gate)
def _gate(op: Gate, frame: MetalFrame) -> None:
    x, g = frame[op.x], frame[op.g]
    parts = x.reshape(*g.shape, op.span)
    frame[op.out] = OPENINGS[op.kind](parts, g[..., None]).reshape(x.shape)


@OPS.add(Route)
def _route(op: Route, frame: MetalFrame) -> None:
    bias, factor = (None if w is None else frame.array(w) for w in (op.bias, op.factor))
    frame[op.ids], frame[op.slot_weights] = route(frame[op.logits], op.spec, bias, factor)


@OPS.add(Experts)
def _experts(op: Experts, frame: MetalFrame) -> None:
    spec = op.spec

    def activated(gate_up: mx.array) -> mx.array:
        if spec.clamp is not None:
            return clamped(gate_up, spec)
        if not spec.gated:
            return UNGATED[spec.activation](gate_up)
        return GATES[spec.activation](*mx.split(gate_up, 2, axis=-1))

    ids, weights = frame[op.ids], frame[op.slot_weights]
    gate_up, down = frame.matrix(op.gate_up), frame.matrix(op.down)
    x = frame[op.x]
    here = None
    if op.first is not None:
        here = (ids >= op.first) & (ids < op.first + op.down.count)  # (T, k)
        ids = mx.where(here, ids - op.first, 0)
    frame[op.out] = experts(x, ids, weights, gate_up, down, activated, frame.dtype, here)


@OPS.add(Head)
def _head(op: Head, frame: MetalFrame) -> None:
    rows, cap = frame[op.x][frame.step.logit_rows], op.softcap
    logits = frame.matrix(op.w).multiply(rows).astype(mx.float32)  # (L, V)
    frame[op.out] = logits if cap is None else cap * mx.tanh(logits / cap)


@OPS.add(Patches)
def _patches(op: Patches, frame: MetalFrame) -> None:
    frame[op.out] = mx.array(patches_in(frame.step.plan).values)


@OPS.add(Mix)
def _mix(op: Mix, frame: MetalFrame) -> None:
    rows, table = patches_in(frame.step.plan), frame.table(op.w)
    total = mx.zeros((len(rows.table_rows), op.out.width))
    for tap in range(rows.table_rows.shape[1]):
        ids = mx.array(np.ascontiguousarray(rows.table_rows[:, tap]))
        shares = mx.array(np.ascontiguousarray(rows.table_weights[:, tap, None]))
        total = total + table.rows(ids).astype(mx.float32) * shares
    frame[op.out] = total


@OPS.add(Merge)
def _merge(op: Merge, frame: MetalFrame) -> None:
    joined = frame[op.x].reshape(-1, op.count, op.x.width)
    frame[op.out] = joined.mean(axis=1) if op.kind == "mean" else joined.flatten(1)


@OPS.add(Keep)
def _keep(op: Keep, frame: MetalFrame) -> None:
    store = frame.features[op.part]
    store[mx.array(patches_in(frame.step.plan).keep)] = frame[op.x].astype(mx.float32)


@OPS.add(Place)
def _place(op: Place, frame: MetalFrame) -> None:
    x, rows = frame[op.x], frame.step.plan.feature_rows
    if rows is None or not (rows >= 0).any():
        frame[op.out] = x
        return
    found = frame.features[op.part][mx.array(np.maximum(rows, 0))]  # (T, E)
    here = mx.array(rows >= 0)[:, None]
    frame[op.out] = mx.where(here, x + found if op.adds else found, x)


@OPS.add(Pool)
def _pool(op: Pool, frame: MetalFrame) -> None:
    x, last = frame[op.x].astype(mx.float32), frame.step.logit_rows
    if op.kind == "last":
        frame[op.out] = x[last]
        return
    starts, ends = frame.step.plan.query_start, frame.step.plan.logit_rows
    first = starts[np.searchsorted(starts, ends, side="right") - 1]
    if op.kind == "cls":
        frame[op.out] = x[mx.array(first)]
        return
    means = [
        x[begin : end + 1].mean(axis=0)
        for begin, end in zip(first.tolist(), ends.tolist(), strict=True)
    ]
    frame[op.out] = mx.stack(means) if means else x[:0]


@OPS.add(AllReduce)
def _all_reduce(op: AllReduce, frame: MetalFrame) -> None:
    frame[op.out] = frame.others().all_reduce(frame[op.x].astype(mx.float32))


@OPS.add(Send)
def _send(op: Send, frame: MetalFrame) -> None:
    frame.others().send(frame[op.x].astype(mx.float32))


@OPS.add(Recv)
def _recv(op: Recv, frame: MetalFrame) -> None:
    frame[op.out] = frame.others().recv((frame.step.plan.num_tokens, op.out.width))


@OPS.add(AllGather)
def _all_gather(op: AllGather, frame: MetalFrame) -> None:
    frame[op.out] = frame.others().all_gather(frame[op.x].astype(mx.float32), op.widths)


@OPS.add(VocabEmbedding)
def _vocab_embedding(op: VocabEmbedding, frame: MetalFrame) -> None:
    ids = frame.step.tokens - op.first
    has = mx.logical_and(ids >= 0, ids < op.w.rows)
    rows = frame.table(op.w).rows(mx.where(has, ids, 0)).astype(mx.float32)
    frame[op.out] = mx.where(has[:, None], rows, 0.0)
