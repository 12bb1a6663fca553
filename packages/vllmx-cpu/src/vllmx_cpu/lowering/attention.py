"""Attention over pages of keys and values, over pages of latents, and within segments."""

from __future__ import annotations

import numpy as np
from vllmx_core.ops.attention import Attention, AttentionSpec
from vllmx_core.ops.indexer import Indexer
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.segment_attention import SegmentAttention, SegmentSpec
from vllmx_core.plan import F32

from vllmx_cpu.kv_cache import BLOCK_SIZES
from vllmx_cpu.lowering.images import images, rotation
from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.structs import (
    KV_DTYPES,
    VX_DTYPES,
    VxAttention,
    VxIndexer,
    VxLatentAttention,
    VxSegmentAttention,
    VxSpanAttention,
)
from vllmx_cpu.tape import Call

OPS = Table("cpu")
MAX_LATENT_ROW, MAX_HEADS = 1024, 1024
"""kMaxHeadSize and LatentRoom of the native sources."""
MAX_INDEX_SIZE, INDEXER_TOKENS = 512, 64
"""IndexerRoom of the native sources, and numbers of a key that fit into a thread's room."""
SEGMENT_GROUP = 16
"""kGroup of the native sources."""


@OPS.add(Attention)
def _attention(op: Attention, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    pages = model.pages[spec.layer]
    rope, rope_rows = rotation(op.rope, spec.rope_axes, site)
    bias = None if op.bias is None else _by_head(model.weights.vectors[op.bias.name], spec)
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
        window=spec.reach,
        causal=int(spec.causal),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        norm_eps=spec.eps,
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
        bias=None if bias is None else bias.ctypes.data,
        bias_length=0 if bias is None else bias.shape[1] // 2 + 1,
    )
    arguments.kept = bias
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
        picked=None if op.picked is None else site.address(op.picked),
        num_picked=0 if op.picked is None else op.picked.width,
    )
    return [site.call(op, "latent_attention", arguments)]


def score_stride(op: Indexer) -> int:
    """The scores that a token has room for: one for each position of the model's RoPE."""
    return -(-op.rope.rows // 64) * 64


def _has_index(op: Indexer) -> bool:
    """Pairs, queries of a token that fit into a thread's room, and pages of whole entries."""
    spec = op.spec
    queries = spec.num_heads * (-(-spec.head_size // 16) * 16) * 4
    fits = spec.head_size % 2 == 0 and spec.head_size <= MAX_INDEX_SIZE and queries <= 1 << 20
    return fits and BLOCK_SIZES.multiple % spec.ratio == 0


@OPS.add(Indexer, when=_has_index)
def _indexer(op: Indexer, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    pages = model.pages[spec.layer]
    arguments = VxIndexer(
        q=site.address(op.q),
        key=None if op.key is None else site.address(op.key),
        weights=site.address(op.head_weights),
        out=site.address(op.out),
        rope=site.vector(op.rope),
        pages=pages.v.ctypes.data,
        workspace=model.workspace.ctypes.data,
        num_heads=spec.num_heads,
        head_size=spec.head_size,
        rotary_dim=spec.rotary_dim,
        picked=spec.picked,
        interleaved=int(spec.interleaved),
        block_size=model.block_size // spec.ratio,
        kv_dtype=KV_DTYPES[model.kv_dtype],
        group=pages.group,
        stride=score_stride(op),
        ratio=spec.ratio,
    )
    return [site.call(op, "indexer", arguments)]


def segment_dtype(kv_dtype: str) -> str:
    """The type of keys and values of segments: codes would save nothing."""
    return kv_dtype if kv_dtype in VX_DTYPES else "bf16"


def _has_pairs(op: SegmentAttention) -> bool:
    return op.spec.head_size % 2 == 0 and op.spec.head_size <= MAX_LATENT_ROW


@OPS.add(SegmentAttention, when=_has_pairs)
def _segment_attention(op: SegmentAttention, site: Site) -> list[Call]:
    spec, model = op.spec, site.model
    rope, rope_rows = rotation(op.rope, spec.rope_axes, site)
    bias = None if op.bias is None else _by_head(model.weights.vectors[op.bias.name], spec)
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
        bias=None if bias is None else bias.ctypes.data,
        bias_length=0 if bias is None else bias.shape[1] // 2 + 1,
    )
    arguments.kept = bias
    return [site.call(op, "segment_attention", arguments)]


def _by_head(bias: F32, spec: AttentionSpec | SegmentSpec) -> F32:
    """(H, 2n - 1) a bias by distance as the kernel reads it: n is a multiple of its groups."""
    by_head = bias.reshape(-1, spec.num_heads).T
    more = -(by_head.shape[1] // 2 + 1) % SEGMENT_GROUP
    return np.ascontiguousarray(np.pad(by_head, ((0, 0), (more, more))))
