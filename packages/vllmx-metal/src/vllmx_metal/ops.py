"""Handlers of the ops that do not run by their formula. The residual stream and the results of
norms are float32; matrices, attention and gates work in the model's dtype, and MLX's kernels sum in
float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
from vllmx_core.backend_kit.compressed import compress, compressed_attention, rows_seen
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.compress import Compress
from vllmx_core.ops.compressed_attention import CompressedAttention
from vllmx_core.ops.downsample import Downsample, downsample
from vllmx_core.ops.experts import Experts, activated
from vllmx_core.ops.grouped_linear import GroupedLinear
from vllmx_core.ops.head import Head, softcap
from vllmx_core.ops.indexer import Indexer
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.recorded.op_table import OpTable

from vllmx_metal.arrays import METAL
from vllmx_metal.attention import attention, segment_attention
from vllmx_metal.frame import MetalFrame
from vllmx_metal.indexer import pick_tokens
from vllmx_metal.latent_attention import by_head, latent_attention
from vllmx_metal.matrices import LinearWeight
from vllmx_metal.recurrent import recurrence, short_conv

SORTED_FROM = 64
"""Pairs of token and expert from which on it pays to bring those of an expert together."""
OPS: OpTable[MetalFrame, None] = OpTable("metal", formulas=True)


@OPS.add(Linear)
def _linear(op: Linear, frame: MetalFrame) -> None:
    frame[op.out] = frame.matrix(op.w).multiply(frame[op.x]).astype(frame.dtype)


@OPS.add(Downsample)
def _downsample(op: Downsample, frame: MetalFrame) -> None:
    downsample(op, frame, lambda x, w: frame.matrix(w).multiply(x).astype(frame.dtype))


@OPS.add(Attention, when=lambda op: op.bias is None)
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
        None if op.picked is None else frame[op.picked],
    )


@OPS.add(Indexer)
def _indexer(op: Indexer, frame: MetalFrame) -> None:
    frame[op.out] = pick_tokens(op, frame)


@OPS.add(Compress)
def _compress(op: Compress, frame: MetalFrame) -> None:
    pages, step, states = frame.pages[op.spec.layer], frame.state_step, frame.states[op.spec.state]
    before, page = states.before(step.on_device.source), frame.step.block_size
    left, entries, slots = compress(op, frame, step.rows, before, pages.group, page)
    states.data[step.target] = left
    if len(entries):
        (pages.k if op.spec.part == "entries" else pages.v).write(slots, entries)


@OPS.add(CompressedAttention)
def _compressed_attention(op: CompressedAttention, frame: MetalFrame) -> None:
    step, states = frame.state_step, frame.states[op.spec.state]
    seen = rows_seen(op, frame, states.before(step.on_device.source))
    windows, left = step.windows(op.spec.window)
    states.data[step.target] = seen[left][:, None]
    pages = None if op.spec.layer is None else frame.pages[op.spec.layer]

    def entries_at(slots: mx.array) -> mx.array:
        assert pages is not None, "a window alone has no entries"
        return pages.k.gather(slots.flatten()).reshape(*slots.shape, -1)

    group, page = 0 if pages is None else pages.group, frame.step.block_size
    frame[op.out] = compressed_attention(op, frame, seen, windows, entries_at, group, page)


@OPS.add(GroupedLinear)
def _grouped_linear(op: GroupedLinear, frame: MetalFrame) -> None:
    groups = frame[op.x].reshape(-1, op.w.count, op.w.cols)
    frame[op.out] = by_head(groups, frame.matrix(op.w)).astype(frame.dtype).flatten(1)


@OPS.add(SegmentAttention)
def _segment_attention(op: SegmentAttention, frame: MetalFrame) -> None:
    rope, bias = frame.optional(op.rope), frame.optional(op.bias)
    frame[op.out] = segment_attention(frame[op.qkv], op.spec, rope, frame.step, bias)


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
