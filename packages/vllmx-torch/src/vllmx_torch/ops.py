"""Handlers of the ops that do not run by their formula. Activations are float32; matrices are
multiplied in the model's dtype, except for the head, whose rounded logits would tie."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.backend_kit.compressed import compress, compressed_attention, rows_seen
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.combine import Combine
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

from vllmx_torch.arrays import TORCH
from vllmx_torch.attention import attention, segment_attention
from vllmx_torch.experts import experts, some_experts
from vllmx_torch.foreign.op import RunModule
from vllmx_torch.frame import TorchFrame
from vllmx_torch.indexer import pick_tokens
from vllmx_torch.latent_attention import by_head, latent_attention
from vllmx_torch.recurrent import recurrence, short_conv
from vllmx_torch.weights import LinearWeight

_HEAD_VALUES = 1 << 24
"""The head goes to float32 in pieces of about so many values."""


OPS: OpTable[TorchFrame, None] = OpTable("torch", formulas=True)
OPS.add(Combine)(Combine.compute)


@OPS.add(Linear)
def _linear(op: Linear, frame: TorchFrame) -> None:
    frame[op.out] = _product(frame[op.x], frame.matrix(op.w))


def _product(x: Tensor, w: LinearWeight) -> Tensor:
    return functional.linear(x.to(w.matrix.dtype), w.matrix, w.bias).float()


@OPS.add(Downsample)
def _downsample(op: Downsample, frame: TorchFrame) -> None:
    downsample(op, frame, lambda x, w: _product(x, frame.matrix(w)))


@OPS.add(Attention)
def _attention(op: Attention, frame: TorchFrame) -> None:
    pages, weights = frame.pages[op.spec.layer], op.bound(frame.vector)
    frame[op.out] = attention(frame[op.qkv], op.spec, weights, frame.step, pages, frame.scratch)


@OPS.add(LatentAttention)
def _latent_attention(op: LatentAttention, frame: TorchFrame) -> None:
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
        frame.scratch,
        None if op.picked is None else frame[op.picked],
    )


@OPS.add(Indexer)
def _indexer(op: Indexer, frame: TorchFrame) -> None:
    frame[op.out] = pick_tokens(op, frame)


@OPS.add(Compress)
def _compress(op: Compress, frame: TorchFrame) -> None:
    pages, step, states = frame.pages[op.spec.layer], frame.state_step, frame.states[op.spec.state]
    before, page = step.before(states), frame.step.block_size
    left, entries, slots = compress(op, frame, step.rows, before, pages.group, page)
    states[torch.cat([step.target, step.kept])] = left
    (pages.k if op.spec.part == "entries" else pages.v).write(slots, entries)


@OPS.add(CompressedAttention)
def _compressed_attention(op: CompressedAttention, frame: TorchFrame) -> None:
    step, states = frame.state_step, frame.states[op.spec.state]
    seen = rows_seen(op, frame, step.before(states))
    windows, left = step.windows(op.spec.window)
    states[torch.cat([step.target, step.kept])] = seen[left][:, None]
    pages = None if op.spec.layer is None else frame.pages[op.spec.layer]

    def entries_at(slots: Tensor) -> Tensor:
        assert pages is not None, "a window alone has no entries"
        return frame.scratch.gather("k", pages.k, slots)[0]

    group, page = 0 if pages is None else pages.group, frame.step.block_size
    frame[op.out] = compressed_attention(op, frame, seen, windows, entries_at, group, page)


@OPS.add(GroupedLinear)
def _grouped_linear(op: GroupedLinear, frame: TorchFrame) -> None:
    groups = frame[op.x].unflatten(1, (op.w.count, -1))
    frame[op.out] = by_head(groups, frame.matrix(op.w)).flatten(1)


@OPS.add(ShortConv)
def _short_conv(op: ShortConv, frame: TorchFrame) -> None:
    bias, states = frame.optional(op.bias), frame.states[op.spec.state]
    w, step = frame.vector(op.w), frame.state_step
    frame[op.out] = short_conv(frame[op.x], w, bias, op.spec, step, states)


@OPS.add(Recurrence)
def _recurrence(op: Recurrence, frame: TorchFrame) -> None:
    b, states = None if op.b is None else frame[op.b], frame.states[op.spec.state]
    frame[op.out] = recurrence(
        frame[op.qkv], frame[op.a], b, op.spec, op.bound(frame.vector), frame.state_step, states
    )


@OPS.add(SegmentAttention)
def _segment_attention(op: SegmentAttention, frame: TorchFrame) -> None:
    rope, bias = frame.optional(op.rope), frame.optional(op.bias)
    frame[op.out] = segment_attention(frame[op.qkv], op.spec, rope, frame.step, bias)


@OPS.add(Experts)
def _experts(op: Experts, frame: TorchFrame) -> None:
    inner = partial(activated, spec=op.spec, xp=TORCH)
    ids, weights = frame[op.ids], frame[op.slot_weights]
    gate_up, down = frame.matrix(op.gate_up), frame.matrix(op.down)
    if op.first is None:
        frame[op.out] = experts(frame[op.x], ids, weights, gate_up, down, inner)
    else:
        local = ids - op.first
        frame[op.out] = some_experts(frame[op.x], local, weights, gate_up, down, inner)


@OPS.add(Head)
def _head(op: Head, frame: TorchFrame) -> None:
    logits = _float_linear(frame[op.x][frame.step.logit_rows], frame.matrix(op.w))  # (L, V)
    frame[op.out] = softcap(logits, op.softcap, TORCH)


@OPS.add(RunModule)
def _run_module(op: RunModule, frame: TorchFrame) -> None:
    frame[op.out] = frame.module().logits(frame.step, frame.pages, frame.scratch)


def _float_linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x (L, E) float32 times the matrix, without rounding it to the matrix's dtype."""
    if w.matrix.dtype == torch.float32:
        return functional.linear(x, w.matrix, w.bias)
    step = max(1, _HEAD_VALUES // w.matrix.shape[1])
    logits = torch.cat([x @ rows.float().T for rows in w.matrix.split(step)], dim=-1)
    return logits if w.bias is None else logits + w.bias
