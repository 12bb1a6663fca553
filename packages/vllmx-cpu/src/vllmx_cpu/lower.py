"""From ops to what the native team runs: a function and a struct of arguments each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass
from typing import get_args

from vllmx_core.op_table import OpTable
from vllmx_core.ops.activation import Act
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.gate import Gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.head import Head
from vllmx_core.ops.head_norm import HeadNorm
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.layer_norm import LayerNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op
from vllmx_core.ops.pool import Pool
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.route import Route
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.ops.values import IdSource, Value, WeightRef

from vllmx_cpu import state_ops
from vllmx_cpu.kv_cache import LayerPages
from vllmx_cpu.memory import Bytes
from vllmx_cpu.native import SCRATCH_BYTES, Isa
from vllmx_cpu.packing import LoadedWeights
from vllmx_cpu.structs import (
    ACTIVATIONS,
    KV_DTYPES,
    NO_ACTIVATION,
    VX_DTYPES,
    VxAttention,
    VxElementwise,
    VxEmbedding,
    VxExperts,
    VxLatentAttention,
    VxLinear,
    VxNorm,
    VxRoute,
    VxSegmentAttention,
)
from vllmx_cpu.tape import Call

Address = Callable[[Value], int]


@dataclass(frozen=True, slots=True)
class Lowering:
    """What the ops of one loaded model point to."""

    isa: Isa
    weights: LoadedWeights
    segments: Mapping[str, Sequence[str]]
    """Names of the matrices that make up a weight, one below the other."""
    pages: tuple[LayerPages, ...]
    states: tuple[state_ops.VxStates, ...]
    block_size: int
    kv_dtype: str
    panels: Bytes
    """Packed activations of the largest product; in use only inside one op."""
    workspace: Bytes
    """Of attention and experts; in use only inside one op."""

    def lower(self, op: Op, address: Address) -> list[Call]:
        """The calls of an op whose values lie at `address(value)`; more than one where its weight
        has several segments."""
        return OPS(op, Site(self, address))


@dataclass(frozen=True, slots=True)
class Site:
    """Where one op is lowered: what the model has, and where its values lie."""

    model: Lowering
    address: Address

    def call(self, op: Op, function: str, arguments: ctypes.Structure) -> Call:
        """A call of the native function of this name."""
        pooled = bool(op.reads) and all(value.rows == "L" for value in op.reads)
        return Call(op.name, self.model.isa.op(function, type(arguments)), arguments, pooled)

    def vector(self, ref: WeightRef | None) -> int | None:
        """The address of a vector or a constant; None for none."""
        if ref is None:
            return None
        return int(self.model.weights.vectors[ref.name].ctypes.data)


OPS: OpTable[Site, list[Call]] = OpTable("cpu")
MAX_LATENT_ROW, MAX_HEADS = 1024, 1024
"""kMaxHeadSize and LatentRoom of the native sources."""
IDS = get_args(IdSource)
"""What an embedding reads, as native/ops.h numbers it."""
GATES = ACTIVATIONS | {"sigmoid": 4, "identity": 5, "tanh": 6, "relu2": 7}
"""Kinds of native/gate.cpp."""
MAX_EXPERTS = SCRATCH_BYTES // 32
"""Of a token's scores, which lie three times in a thread's scratch memory."""


@OPS.add(Embedding)
def _embedding(op: Embedding, site: Site) -> list[Call]:
    matrix = site.model.weights.matrices[op.w.name]
    arguments = VxEmbedding(
        matrix.struct(), site.address(op.out), IDS.index(op.ids.source), op.offset
    )
    return [site.call(op, "embedding", arguments)]


@OPS.add(Linear)
def _linear(op: Linear, site: Site) -> list[Call]:
    return _products(op, op.x, op.w, op.out, site)


@OPS.add(GatedLinear)
def _gated_linear(op: GatedLinear, site: Site) -> list[Call]:
    return _products(op, op.x, op.w, op.out, site, activation=ACTIVATIONS[op.kind])


@OPS.add(Head)
def _head(op: Head, site: Site) -> list[Call]:
    return _products(op, op.x, op.w, op.out, site, logit_rows=1, softcap=op.softcap or 0.0)


def _products(
    op: Op,
    x: Value,
    w: WeightRef,
    out: Value,
    site: Site,
    *,
    activation: int = NO_ACTIVATION,
    logit_rows: int = 0,
    softcap: float = 0.0,
) -> list[Call]:
    """One product for each segment of the weight, side by side in the result."""
    calls: list[Call] = []
    column = 0
    for name in site.model.segments[w.name]:
        matrix = site.model.weights.matrices[name]
        arguments = VxLinear(
            w=matrix.struct(),
            x=site.address(x),
            y=site.address(out) + column * 4,
            panels=site.model.panels.ctypes.data,
            activation=activation,
            logit_rows=logit_rows,
            softcap=softcap,
            stride=out.width,
        )
        calls.append(site.call(op, "linear", arguments))
        column += matrix.shape.rows
    return calls


@OPS.add(RmsNorm)
def _rms_norm(op: RmsNorm, site: Site) -> list[Call]:
    arguments = VxNorm(
        x=site.address(op.x),
        weight=site.vector(op.w),
        y=site.address(op.out),
        width=op.out.width,
        eps=op.eps,
    )
    return [site.call(op, "rms_norm", arguments)]


@OPS.add(AddRmsNorm)
def _add_rms_norm(op: AddRmsNorm, site: Site) -> list[Call]:
    arguments = VxNorm(
        x=site.address(op.x), residual=site.address(op.residual), weight=site.vector(op.w),
        sum=site.address(op.total), y=site.address(op.out), width=op.out.width, eps=op.eps,
    )  # fmt: skip
    return [site.call(op, "rms_norm", arguments)]


@OPS.add(LayerNorm)
def _layer_norm(op: LayerNorm, site: Site) -> list[Call]:
    arguments = VxNorm(
        x=site.address(op.x), weight=site.vector(op.w), bias=site.vector(op.bias),
        y=site.address(op.out), width=op.out.width, eps=op.eps,
    )  # fmt: skip
    return [site.call(op, "layer_norm", arguments)]


@OPS.add(GatedAct)
def _gated_act(op: GatedAct, site: Site) -> list[Call]:
    arguments = VxElementwise(
        x=site.address(op.gate_up),
        y=site.address(op.out),
        width=op.out.width,
        activation=ACTIVATIONS[op.kind],
    )
    return [site.call(op, "gated_act", arguments)]


@OPS.add(Act)
def _activation(op: Act, site: Site) -> list[Call]:
    arguments = VxElementwise(
        x=site.address(op.x),
        y=site.address(op.out),
        width=op.out.width,
        activation=GATES[op.kind],
    )
    return [site.call(op, "activation", arguments)]


@OPS.add(Add)
def _add(op: Add, site: Site) -> list[Call]:
    arguments = VxElementwise(
        x=site.address(op.x), other=site.address(op.y), y=site.address(op.out), width=op.out.width
    )
    return [site.call(op, "add", arguments)]


@OPS.add(Scale)
def _scale(op: Scale, site: Site) -> list[Call]:
    arguments = VxElementwise(
        x=site.address(op.x), y=site.address(op.out), width=op.out.width, factor=op.factor
    )
    return [site.call(op, "scale", arguments)]


class VxScaleBy(ctypes.Structure):
    """Arguments of `scale_by`; native/scale_by.cpp."""

    _fields_ = [
        ("x", c_void_p), ("w", c_void_p), ("y", c_void_p), ("width", c_int32), ("span", c_int32)
    ]  # fmt: skip


@OPS.add(ScaleBy)
def _scale_by(op: ScaleBy, site: Site) -> list[Call]:
    arguments = VxScaleBy(
        site.address(op.x), site.vector(op.w), site.address(op.out), op.x.width, op.span
    )
    return [site.call(op, "scale_by", arguments)]


class VxHeadNorm(ctypes.Structure):
    """Arguments of `head_norm`; native/head_norm.cpp."""

    _fields_ = [
        ("x", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("y", c_void_p),
        ("heads", c_int32), ("kv_heads", c_int32), ("head_size", c_int32), ("across", c_int32),
        ("centred", c_int32), ("values", c_int32), ("eps", c_float),
    ]  # fmt: skip


@OPS.add(HeadNorm)
def _head_norm(op: HeadNorm, site: Site) -> list[Call]:
    spec = op.spec
    arguments = VxHeadNorm(
        site.address(op.qkv), site.vector(op.q_norm), site.vector(op.k_norm), site.address(op.out),
        spec.num_heads, spec.num_kv_heads, spec.head_size, int(spec.across),
        int(spec.kind == "layer"), int(spec.values), spec.eps,
    )  # fmt: skip
    return [site.call(op, "head_norm", arguments)]


class VxGate(ctypes.Structure):
    """Arguments of `gate`; native/gate.cpp."""

    _fields_ = [
        ("x", c_void_p), ("g", c_void_p), ("y", c_void_p), ("width", c_int32), ("span", c_int32),
        ("kind", c_int32),
    ]  # fmt: skip


@OPS.add(Gate)
def _gate(op: Gate, site: Site) -> list[Call]:
    arguments = VxGate(
        site.address(op.x), site.address(op.g), site.address(op.out), op.x.width, op.span,
        GATES[op.kind],
    )  # fmt: skip
    return [site.call(op, "gate", arguments)]


class VxPool(ctypes.Structure):
    """Arguments of `pool`; native/pool.cpp."""

    _fields_ = [("x", c_void_p), ("y", c_void_p), ("width", c_int32), ("kind", c_int32)]


@OPS.add(Pool)
def _pool(op: Pool, site: Site) -> list[Call]:
    kind = {"last": 0, "mean": 1, "cls": 2}[op.kind]
    arguments = VxPool(site.address(op.x), site.address(op.out), op.x.width, kind)
    return [site.call(op, "pool", arguments)]


@OPS.add(Route, when=lambda op: op.logits.width <= MAX_EXPERTS)
def _route(op: Route, site: Site) -> list[Call]:
    spec = op.spec
    arguments = VxRoute(
        logits=site.address(op.logits),
        bias=site.vector(op.bias),
        factor=site.vector(op.factor),
        ids=site.address(op.ids),
        weights=site.address(op.slot_weights),
        count=op.logits.width,
        chosen=spec.chosen,
        sigmoid=int(spec.score == "sigmoid"),
        groups=spec.groups,
        groups_kept=spec.groups_kept,
        best_two=int(spec.group_score == "best_two"),
        renormalise=int(spec.renormalise),
        eps=spec.eps,
        scale=spec.scale,
    )
    return [site.call(op, "route", arguments)]


def _has_latents(op: LatentAttention) -> bool:
    """Rows of pairs, not wider and of no more heads than the kernel's rooms."""
    spec = op.spec
    return spec.rank % 2 == 0 and spec.row_size <= MAX_LATENT_ROW and spec.num_heads <= MAX_HEADS


@OPS.add(LatentAttention, when=_has_latents)
def _latent_attention(op: LatentAttention, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    pages, matrices = model.pages[spec.layer], model.weights.matrices
    arguments = VxLatentAttention(
        k_b=matrices[op.k_b.name].struct(),
        v_b=matrices[op.v_b.name].struct(),
        q=site.address(op.q),
        latent=site.address(op.latent),
        out=site.address(op.out),
        rope=site.vector(op.rope),
        norm=site.vector(op.norm),
        pages=pages.k.ctypes.data,
        panels=model.panels.ctypes.data,
        workspace=model.workspace.ctypes.data,
        workspace_bytes=model.workspace.nbytes,
        num_heads=spec.num_heads,
        rank=spec.rank,
        nope_size=spec.nope_size,
        rotary_dim=spec.rotary_dim,
        value_size=spec.value_size,
        interleaved=int(spec.interleaved),
        block_size=model.block_size,
        kv_dtype=KV_DTYPES[model.kv_dtype],
        group=pages.group,
        scale=spec.scale,
        norm_eps=spec.norm_eps,
    )
    return [site.call(op, "latent_attention", arguments)]


@OPS.add(Experts)
def _experts(op: Experts, site: Site) -> list[Call]:
    spec, matrices = op.spec, site.model.weights.matrices
    arguments = VxExperts(
        gate_up=matrices[op.gate_up.name].struct(),
        down=matrices[op.down.name].struct(),
        x=site.address(op.x),
        ids=site.address(op.ids),
        weights=site.address(op.slot_weights),
        y=site.address(op.out),
        panels=site.model.panels.ctypes.data,
        workspace=site.model.workspace.ctypes.data,
        count=op.gate_up.count,
        chosen=op.ids.width,
        activation=GATES[spec.activation],
        clamp=spec.clamp or 0.0,
        alpha=spec.alpha,
    )
    return [site.call(op, "experts", arguments)]


@OPS.add(Attention)
def _attention(op: Attention, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    pages = model.pages[spec.layer]
    arguments = VxAttention(
        qkv=site.address(op.qkv),
        out=site.address(op.out),
        out_dtype=VX_DTYPES["f32"],
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        rotary_dim=spec.rotary_dim,
        interleaved=int(spec.interleaved),
        block_size=model.block_size,
        kv_dtype=KV_DTYPES[model.kv_dtype],
        window=spec.window or 0,
        causal=int(spec.causal),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        norm_eps=spec.norm_eps,
        rope=site.vector(op.rope),
        q_norm=site.vector(op.q_norm),
        k_norm=site.vector(op.k_norm),
        sinks=site.vector(op.sinks),
        k_pages=pages.k.ctypes.data,
        v_pages=pages.v.ctypes.data,
        workspace=model.workspace.ctypes.data,
        workspace_bytes=model.workspace.nbytes,
        group=pages.group,
        shared=int(spec.shared),
    )
    return [site.call(op, "attention", arguments)]


def segment_dtype(kv_dtype: str) -> str:
    """What keys and values of segments are held in: codes would save nothing."""
    return kv_dtype if kv_dtype in VX_DTYPES else "bf16"


def _has_pairs(op: SegmentAttention) -> bool:
    return op.spec.head_size % 2 == 0 and op.spec.head_size <= MAX_LATENT_ROW


@OPS.add(SegmentAttention, when=_has_pairs)
def _segment_attention(op: SegmentAttention, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    arguments = VxSegmentAttention(
        qkv=site.address(op.qkv),
        out=site.address(op.out),
        rope=site.vector(op.rope),
        workspace=model.workspace.ctypes.data,
        workspace_bytes=model.workspace.nbytes,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        rotary_dim=spec.rotary_dim,
        interleaved=int(spec.interleaved),
        dtype=KV_DTYPES[segment_dtype(model.kv_dtype)],
        window=spec.window or 0,
        scale=spec.scale,
    )
    return [site.call(op, "segment_attention", arguments)]


@OPS.add(ShortConv, when=state_ops.has_taps)
def _short_conv(op: ShortConv, site: Site) -> list[Call]:
    return [site.call(op, "short_conv", state_ops.short_conv(op, site))]


@OPS.add(Recurrence, when=state_ops.has_keys)
def _recurrence(op: Recurrence, site: Site) -> list[Call]:
    return [site.call(op, "recurrence", state_ops.recurrence(op, site))]


def lower_all(
    lowering: Lowering, ops: Sequence[Op], offsets: Mapping[Value, int], base: int
) -> list[Call]:
    """The recorded step over one buffer at address `base`."""
    return [call for op in ops for call in lowering.lower(op, lambda value: base + offsets[value])]
