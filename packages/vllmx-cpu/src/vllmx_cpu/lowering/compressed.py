"""Ops of DeepSeek-V4: compressed attention, hyper-connections and products in groups."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32
from typing import Any

from vllmx_core.ops.compress import Compress
from vllmx_core.ops.compressed_attention import CompressedAttention
from vllmx_core.ops.grouped_linear import GroupedLinear
from vllmx_core.ops.hyper_connections import HyperRead, HyperSpec, HyperStreams, HyperWrite

from vllmx_cpu.kv_cache import VxStates
from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.structs import KV_DTYPES, VxWeight, floats, ints, pointers
from vllmx_cpu.tape import Call

OPS = Table("cpu")
MAX_STREAMS, MAX_ROW, MAX_GROUPS, GROUPED_TOKENS = 16, 1024, 128, 64
"""MAX_STREAMS, kMaxHeadSize, MAX_GROUPS and GROUPED_TOKENS of the native sources."""


class VxHyper(Structure):
    """Arguments of the ops of hyper-connections; native/hyper_connections.cpp."""

    _fields_ = [
        *pointers("x other mixes scale bias y"),
        *ints("streams width pitch iterations"),
        *floats("eps norm_eps"),
    ]


class VxGroupedLinear(Structure):
    """Arguments of `grouped_linear`; native/grouped_linear.cpp."""

    _fields_ = [("w", VxWeight), *pointers("x y panels workspace"), ("groups", c_int32)]


class VxCompress(Structure):
    """Arguments of `compress`; native/compress.cpp."""

    _fields_ = [
        *pointers("kv_gate rope bias norm pages"),
        ("states", VxStates),
        *ints("size series ratio rotary_dim block_size kv_dtype group"),
        ("norm_eps", c_float),
    ]


class VxCompressedAttention(Structure):
    """Arguments of `compressed_attention`; native/compressed_attention.cpp."""

    _fields_ = [
        *pointers("q row out rope sinks picked pages workspace"),
        ("states", VxStates),
        *ints("heads size rotary_dim window ratio num_picked block_size kv_dtype group"),
        *floats("scale norm_eps"),
    ]


@OPS.add(HyperStreams, when=lambda op: op.streams <= MAX_STREAMS)
def _streams(op: HyperStreams, site: Site) -> list[Call]:
    x, y = site.address(op.x), site.address(op.out)
    arguments = VxHyper(x=x, y=y, streams=op.streams, width=op.x.width)
    return [site.call(op, op.name, arguments)]


@OPS.add(HyperRead, when=lambda op: op.spec.streams <= MAX_STREAMS)
def _read(op: HyperRead, site: Site) -> list[Call]:
    return _mixed(op, op.spec, site)


@OPS.add(HyperWrite, when=lambda op: op.spec.streams <= MAX_STREAMS)
def _write(op: HyperWrite, site: Site) -> list[Call]:
    return _mixed(op, op.spec, site, other=site.address(op.y))


def _mixed(op: HyperRead | HyperWrite, spec: HyperSpec, site: Site, **more: Any) -> list[Call]:
    arguments = VxHyper(
        x=site.address(op.x),
        mixes=site.address(op.mixes),
        scale=site.vector(op.scale),
        bias=site.vector(op.bias),
        y=site.address(op.out),
        streams=spec.streams,
        width=op.x.width // spec.streams,
        pitch=op.mixes.width,
        iterations=spec.iterations,
        eps=spec.eps,
        norm_eps=spec.norm_eps,
        **more,
    )
    return [site.call(op, op.name, arguments)]


def grouped_numbers(op: GroupedLinear) -> int:
    """The float32 numbers of its workspace."""
    return GROUPED_TOKENS * (op.x.width + op.out.width)


@OPS.add(GroupedLinear, when=lambda op: op.w.count <= MAX_GROUPS)
def _grouped_linear(op: GroupedLinear, site: Site) -> list[Call]:
    arguments = VxGroupedLinear(
        site.model.weights.matrices[op.w.name].struct(),
        site.address(op.x),
        site.address(op.out),
        site.model.panels.ctypes.data,
        site.model.workspace.ctypes.data,
        op.w.count,
    )
    return [site.call(op, "grouped_linear", arguments)]


@OPS.add(Compress, when=lambda op: op.spec.size <= MAX_ROW)
def _compress(op: Compress, site: Site) -> list[Call]:
    spec = op.spec
    pages = site.model.pages[spec.layer]
    arguments = VxCompress(
        kv_gate=site.address(op.kv_gate),
        rope=site.vector(op.rope),
        bias=site.vector(op.bias),
        norm=site.vector(op.norm),
        pages=(pages.k if spec.part == "entries" else pages.v).ctypes.data,
        states=site.model.states[spec.state],
        size=spec.size,
        series=spec.series,
        ratio=spec.ratio,
        rotary_dim=spec.rotary_dim,
        norm_eps=spec.norm_eps,
        **_cache(site, spec.layer),
    )
    return [site.call(op, "compress", arguments)]


def _cache(site: Site, layer: int) -> dict[str, int]:
    model = site.model
    dtype, group = KV_DTYPES[model.kv_dtype], model.pages[layer].group
    return {"block_size": model.block_size, "kv_dtype": dtype, "group": group}


@OPS.add(CompressedAttention, when=lambda op: op.spec.head_size <= MAX_ROW)
def _compressed_attention(op: CompressedAttention, site: Site) -> list[Call]:
    spec, entries = op.spec, {}
    if spec.layer is not None:
        pages = site.model.pages[spec.layer].k.ctypes.data
        entries = {"pages": pages, "ratio": spec.ratio, **_cache(site, spec.layer)}
    if op.picked is not None:
        entries |= {"picked": site.address(op.picked), "num_picked": op.picked.width}
    arguments = VxCompressedAttention(
        q=site.address(op.q),
        row=site.address(op.row),
        out=site.address(op.out),
        rope=site.vector(op.rope),
        sinks=site.vector(op.sinks),
        workspace=site.model.workspace.ctypes.data,
        states=site.model.states[spec.state],
        heads=spec.num_heads,
        size=spec.head_size,
        rotary_dim=spec.rotary_dim,
        window=spec.window,
        scale=spec.scale,
        norm_eps=spec.norm_eps,
        **entries,
    )
    return [site.call(op, "compressed_attention", arguments)]
