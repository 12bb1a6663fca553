"""Attention over pages of keys and values, over pages of latents, and within segments."""

from __future__ import annotations

from vllmx_core.ops.attention import Attention
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.segment_attention import SegmentAttention

from vllmx_cpu.lowering.images import images, rotation
from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.structs import (
    KV_DTYPES,
    VX_DTYPES,
    VxAttention,
    VxLatentAttention,
    VxSegmentAttention,
    VxSpanAttention,
)
from vllmx_cpu.tape import Call

OPS = Table("cpu")
MAX_LATENT_ROW, MAX_HEADS = 1024, 1024
"""kMaxHeadSize and LatentRoom of the native sources."""


@OPS.add(Attention)
def _attention(op: Attention, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    pages = model.pages[spec.layer]
    rope, rope_rows = rotation(op.rope, spec.rope_axes, site)
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
        rope=rope,
        rope_rows=rope_rows,
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
    if spec.spans:
        return [site.call(op, "span_attention", VxSpanAttention(arguments, images(site)))]
    return [site.call(op, "attention", arguments)]


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


def segment_dtype(kv_dtype: str) -> str:
    """The type of keys and values of segments: codes would save nothing."""
    return kv_dtype if kv_dtype in VX_DTYPES else "bf16"


def _has_pairs(op: SegmentAttention) -> bool:
    return op.spec.head_size % 2 == 0 and op.spec.head_size <= MAX_LATENT_ROW


@OPS.add(SegmentAttention, when=_has_pairs)
def _segment_attention(op: SegmentAttention, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    rope, rope_rows = rotation(op.rope, spec.rope_axes, site)
    arguments = VxSegmentAttention(
        qkv=site.address(op.qkv),
        out=site.address(op.out),
        rope=rope,
        rope_rows=rope_rows,
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
        images=images(site) if spec.windowed else None,
        pieces=1,
    )
    return [site.call(op, "segment_attention", arguments)]
