"""The ops on tensors, one handler each. Activations are float32; matrices are multiplied in the
model's dtype, except for the head, whose rounded logits would tie."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.ops.activation import Act
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.clip import Clip
from vllmx_core.ops.combine import Combine
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

from vllmx_torch.attention import attention, rms_norm
from vllmx_torch.experts import clamped, experts, held_by, route, some_experts
from vllmx_torch.foreign.op import RunModule
from vllmx_torch.frame import TorchFrame
from vllmx_torch.latent_attention import latent_attention
from vllmx_torch.recurrent import recurrence, short_conv
from vllmx_torch.segment_attention import segment_attention
from vllmx_torch.transfer import upload
from vllmx_torch.weights import LinearWeight

_HEAD_VALUES = 1 << 24
"""The head goes to float32 in pieces of about so many values."""


OPS: OpTable[TorchFrame, None] = OpTable("torch")
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@OPS.add(Embedding)
def _embedding(op: Embedding, frame: TorchFrame) -> None:
    ids: Tensor = getattr(frame.step, op.ids.source)
    if op.ids.source == "token_types":
        ids = ids.clamp(max=op.w.rows - 1)
    frame[op.out] = frame.tensor(op.w)[ids + op.offset].float()


@OPS.add(RmsNorm)
def _rms_norm(op: RmsNorm, frame: TorchFrame) -> None:
    frame[op.out] = rms_norm(frame[op.x], frame.tensor(op.w), op.eps)


@OPS.add(AddRmsNorm)
def _add_rms_norm(op: AddRmsNorm, frame: TorchFrame) -> None:
    total = frame[op.x] + frame[op.residual]
    frame[op.out], frame[op.total] = rms_norm(total, frame.tensor(op.w), op.eps), total


@OPS.add(LayerNorm)
def _layer_norm(op: LayerNorm, frame: TorchFrame) -> None:
    w, bias = frame.tensor(op.w), None if op.bias is None else frame.tensor(op.bias)
    frame[op.out] = functional.layer_norm(frame[op.x], w.shape, w, bias, op.eps)


@OPS.add(HeadNorm)
def _head_norm(op: HeadNorm, frame: TorchFrame) -> None:
    spec, size = op.spec, op.spec.head_size
    widths = [heads * size for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    q, k, v = frame[op.qkv].split(widths, dim=-1)
    if op.q_norm is not None:
        q = _normed_heads(q, frame.tensor(op.q_norm), spec)
    if op.k_norm is not None:
        k = _normed_heads(k, frame.tensor(op.k_norm), spec)
    if spec.values:
        v = functional.rms_norm(v.view(len(v), -1, size), (size,), None, spec.eps).flatten(1)
    frame[op.out] = torch.cat([q, k, v], dim=-1)


def _normed_heads(x: Tensor, w: Tensor, spec: HeadNormSpec) -> Tensor:
    """(T, heads * D) -> the same."""
    runs = x.unflatten(-1, (-1, x.shape[-1] if spec.across else spec.head_size))
    weights = w.view(runs.shape[1:])
    if spec.kind == "rms":
        return rms_norm(runs, weights, spec.eps).flatten(1)
    return (functional.layer_norm(runs, runs.shape[2:], eps=spec.eps) * weights).flatten(1)


@OPS.add(Linear)
def _linear(op: Linear, frame: TorchFrame) -> None:
    w = frame.matrix(op.w)
    frame[op.out] = functional.linear(frame[op.x].to(w.matrix.dtype), w.matrix, w.bias).float()


@OPS.add(Attention)
def _attention(op: Attention, frame: TorchFrame) -> None:
    pages, weights = frame.pages[op.spec.layer], op.bound(frame.tensor)
    frame[op.out] = attention(frame[op.qkv], op.spec, weights, frame.step, pages, frame.scratch)


@OPS.add(LatentAttention)
def _latent_attention(op: LatentAttention, frame: TorchFrame) -> None:
    frame[op.out] = latent_attention(
        frame[op.q],
        frame[op.latent],
        op.spec,
        frame.tensor(op.rope),
        frame.tensor(op.norm),
        frame.matrix(op.k_b),
        frame.matrix(op.v_b),
        frame.step,
        frame.pages[op.spec.layer],
        frame.scratch,
    )


@OPS.add(ShortConv)
def _short_conv(op: ShortConv, frame: TorchFrame) -> None:
    bias, states = None if op.bias is None else frame.tensor(op.bias), frame.states[op.spec.state]
    w, step = frame.tensor(op.w), frame.state_step
    frame[op.out] = short_conv(frame[op.x], w, bias, op.spec, step, states)


@OPS.add(Recurrence)
def _recurrence(op: Recurrence, frame: TorchFrame) -> None:
    b, states = None if op.b is None else frame[op.b], frame.states[op.spec.state]
    frame[op.out] = recurrence(
        frame[op.qkv], frame[op.a], b, op.spec, op.bound(frame.tensor), frame.state_step, states
    )


@OPS.add(SegmentAttention)
def _segment_attention(op: SegmentAttention, frame: TorchFrame) -> None:
    rope = None if op.rope is None else frame.tensor(op.rope)
    frame[op.out] = segment_attention(frame[op.qkv], op.spec, rope, frame.step)


@OPS.add(GatedAct)
def _gated_act(op: GatedAct, frame: TorchFrame) -> None:
    gate, up = frame[op.gate_up].chunk(2, dim=-1)
    frame[op.out] = _ACTIVATIONS[op.kind](gate) * up


@OPS.add(Act)
def _activation(op: Act, frame: TorchFrame) -> None:
    frame[op.out] = _GATES[op.kind](frame[op.x])


@OPS.add(Add)
def _add(op: Add, frame: TorchFrame) -> None:
    frame[op.out] = frame[op.x] + frame[op.y]


@OPS.add(Scale)
def _scale(op: Scale, frame: TorchFrame) -> None:
    frame[op.out] = frame[op.x] * op.factor


@OPS.add(ScaleBy)
def _scale_by(op: ScaleBy, frame: TorchFrame) -> None:
    x, w = frame[op.x], frame.tensor(op.w)
    frame[op.out] = (x.view(-1, op.w.rows, op.span) * w[:, None]).view_as(x)


@OPS.add(Clip)
def _clip(op: Clip, frame: TorchFrame) -> None:
    bounds = frame.tensor(op.bounds).view(-1, 2)
    parts = [frame[x].clamp(*pair) for x, pair in zip(op.reads, bounds, strict=True)]
    frame[op.out] = torch.cat(parts, dim=-1)


_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    **_ACTIVATIONS,
    "sigmoid": torch.sigmoid,
    "identity": lambda g: g,
    "tanh": torch.tanh,
    "relu2": lambda g: functional.relu(g).square(),
}


@OPS.add(Gate)
def _gate(op: Gate, frame: TorchFrame) -> None:
    x, opened = frame[op.x], _GATES[op.kind](frame[op.g])
    frame[op.out] = (x.view(*opened.shape, op.span) * opened[..., None]).view_as(x)


@OPS.add(Route)
def _route(op: Route, frame: TorchFrame) -> None:
    bias, factor = (None if w is None else frame.tensor(w) for w in (op.bias, op.factor))
    frame[op.ids], frame[op.slot_weights] = route(frame[op.logits], op.spec, bias, factor)


@OPS.add(Experts)
def _experts(op: Experts, frame: TorchFrame) -> None:
    spec = op.spec

    def activated(gate_up: Tensor) -> Tensor:
        if spec.clamp is not None:
            return clamped(gate_up, spec)
        if not spec.gated:
            return _GATES[spec.activation](gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[spec.activation](gate) * up

    ids, weights = frame[op.ids], frame[op.slot_weights]
    gate_up, down = frame.matrix(op.gate_up), frame.matrix(op.down)
    if op.first is None:
        frame[op.out] = experts(frame[op.x], ids, weights, gate_up, down, activated)
    else:
        local = ids - op.first
        frame[op.out] = some_experts(frame[op.x], local, weights, gate_up, down, activated)


@OPS.add(Head)
def _head(op: Head, frame: TorchFrame) -> None:
    logits = _float_linear(frame[op.x][frame.step.logit_rows], frame.matrix(op.w))  # (L, V)
    cap = op.softcap
    frame[op.out] = logits if cap is None else cap * torch.tanh(logits / cap)


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


@OPS.add(Patches)
def _patches(op: Patches, frame: TorchFrame) -> None:
    frame[op.out] = upload(patches_in(frame.step.plan).values, np.float32, frame.step.tokens.device)


@OPS.add(Mix)
def _mix(op: Mix, frame: TorchFrame) -> None:
    rows, table = patches_in(frame.step.plan), frame.tensor(op.w)
    taps = table[upload(rows.table_rows, np.int64, table.device)].float()  # (T, k, E)
    weights = upload(rows.table_weights, np.float32, table.device)
    frame[op.out] = torch.einsum("tke,tk->te", taps, weights)


@OPS.add(Merge)
def _merge(op: Merge, frame: TorchFrame) -> None:
    joined = frame[op.x].reshape(-1, op.count, op.x.width)
    frame[op.out] = joined.mean(1) if op.kind == "mean" else joined.reshape(-1, op.out.width)


@OPS.add(Keep)
def _keep(op: Keep, frame: TorchFrame) -> None:
    x, store = frame[op.x], frame.features[op.part]
    store[upload(patches_in(frame.step.plan).keep, np.int64, x.device)] = x.float()


@OPS.add(Place)
def _place(op: Place, frame: TorchFrame) -> None:
    x, rows = frame[op.x], frame.step.plan.feature_rows
    if rows is None or not (rows >= 0).any():
        frame[op.out] = x
        return
    here = np.flatnonzero(rows >= 0)
    found = frame.features[op.part][upload(rows[here], np.int64, x.device)]
    at = upload(here, np.int64, x.device)
    frame[op.out] = x.index_add(0, at, found) if op.adds else x.index_copy(0, at, found)


@OPS.add(Pool)
def _pool(op: Pool, frame: TorchFrame) -> None:
    x, plan, last = frame[op.x], frame.step.plan, frame.step.logit_rows
    if op.kind == "last":
        frame[op.out] = x[last]
        return
    row = np.searchsorted(plan.query_start, plan.logit_rows, side="right") - 1
    first = plan.query_start[row]
    if op.kind == "cls":
        frame[op.out] = x[upload(first, np.int64, x.device)]
        return
    means = [x[begin : end + 1].mean(0) for begin, end in zip(first, plan.logit_rows, strict=True)]
    frame[op.out] = torch.stack(means) if means else x[:0]


@OPS.add(Combine)
def _combine(op: Combine, frame: TorchFrame) -> None:
    ends = torch.tensor(op.ends, device=frame[op.ids].device)
    frame[op.out] = frame.others().sum_rows(frame[op.x], held_by(frame[op.ids], ends))


@OPS.add(AllReduce)
def _all_reduce(op: AllReduce, frame: TorchFrame) -> None:
    frame[op.out] = frame.others().all_reduce(frame[op.x])


@OPS.add(Send)
def _send(op: Send, frame: TorchFrame) -> None:
    frame.others().send(frame[op.x])


@OPS.add(Recv)
def _recv(op: Recv, frame: TorchFrame) -> None:
    frame[op.out] = frame.others().recv((len(frame.step.tokens), op.out.width))


@OPS.add(AllGather)
def _all_gather(op: AllGather, frame: TorchFrame) -> None:
    frame[op.out] = frame.others().all_gather(frame[op.x], op.widths)


@OPS.add(VocabEmbedding)
def _vocab_embedding(op: VocabEmbedding, frame: TorchFrame) -> None:
    table, ids = frame.tensor(op.w), frame.step.tokens - op.first
    has = (ids >= 0) & (ids < len(table))
    frame[op.out] = table[torch.where(has, ids, 0)].float() * has[:, None]
