"""Ops that work on each row by itself: norms, activations, gates, sums, and rows picked out."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_void_p

from vllmx_core.ops.activation import Act
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.clip import Clip
from vllmx_core.ops.gate import Gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head_norm import HeadNorm
from vllmx_core.ops.layer_norm import LayerNorm
from vllmx_core.ops.match_rms import FLOOR, MatchRms
from vllmx_core.ops.pool import Pool
from vllmx_core.ops.resize import Resize
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_at import ScaleAt
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.slice import Slice
from vllmx_core.ops.sparsify import Sparsify
from vllmx_core.ops.spread import Spread
from vllmx_core.ops.values import Value

from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.structs import ACTIVATIONS, GATES, VxElementwise, VxNorm, ints, pointers
from vllmx_cpu.tape import Call

OPS = Table("cpu")


@OPS.add(RmsNorm)
def _rms_norm(op: RmsNorm, site: Site) -> list[Call]:
    return _norm(op, site, "rms_norm")


@OPS.add(AddRmsNorm)
def _add_rms_norm(op: AddRmsNorm, site: Site) -> list[Call]:
    addresses = {"residual": site.address(op.residual), "sum": site.address(op.total)}
    return _norm(op, site, "rms_norm", **addresses)


@OPS.add(LayerNorm)
def _layer_norm(op: LayerNorm, site: Site) -> list[Call]:
    return _norm(op, site, "layer_norm", bias=site.vector(op.bias))


def _norm(
    op: RmsNorm | AddRmsNorm | LayerNorm,
    site: Site,
    function: str,
    **more: int | None,
) -> list[Call]:
    arguments = VxNorm(
        x=site.address(op.x),
        weight=site.vector(op.w),
        y=site.address(op.out),
        width=op.out.width,
        eps=op.eps,
        **more,
    )
    return [site.call(op, function, arguments)]


@OPS.add(GatedAct)
def _gated_act(op: GatedAct, site: Site) -> list[Call]:
    more = {"activation": ACTIVATIONS[op.kind], "factor": op.limit or 0.0}
    return _elementwise(op, site, op.gate_up, **more)


@OPS.add(Act)
def _activation(op: Act, site: Site) -> list[Call]:
    return _elementwise(op, site, op.x, activation=GATES[op.kind])


@OPS.add(Add)
def _add(op: Add, site: Site) -> list[Call]:
    return _elementwise(op, site, op.x, other=site.address(op.y))


@OPS.add(Scale)
def _scale(op: Scale, site: Site) -> list[Call]:
    return _elementwise(op, site, op.x, factor=op.factor)


def _elementwise(
    op: GatedAct | Act | Add | Scale, site: Site, x: Value, **more: float
) -> list[Call]:
    """The native function of the op's name."""
    out = op.out
    arguments = VxElementwise(x=site.address(x), y=site.address(out), width=out.width, **more)
    return [site.call(op, op.name, arguments)]


class VxScaleAt(Structure):
    """Arguments of `scale_at`; native/scale_at.cpp."""

    _fields_ = [*pointers("x table y"), *ints("width features")]


@OPS.add(ScaleAt)
def _scale_at(op: ScaleAt, site: Site) -> list[Call]:
    arguments = VxScaleAt(
        site.address(op.x), site.vector(op.table), site.address(op.out), op.x.width, op.features
    )
    return [site.call(op, "scale_at", arguments)]


class VxScaleBy(Structure):
    """Arguments of `scale_by`; native/scale_by.cpp."""

    _fields_ = [*pointers("x w y"), *ints("width span")]


@OPS.add(ScaleBy)
def _scale_by(op: ScaleBy, site: Site) -> list[Call]:
    arguments = VxScaleBy(
        site.address(op.x), site.vector(op.w), site.address(op.out), op.x.width, op.span
    )
    return [site.call(op, "scale_by", arguments)]


class VxClip(Structure):
    """Arguments of `clip`; native/clip.cpp."""

    _fields_ = [*pointers("x bounds y"), *ints("width pitch")]


@OPS.add(Clip)
def _clip(op: Clip, site: Site) -> list[Call]:
    y, bounds, calls = site.address(op.out), site.model.vector(op.bounds), []
    for index, (x, first) in enumerate(zip(op.reads, op.firsts, strict=True)):
        pair, place = bounds + 8 * index, y + 4 * first
        arguments = VxClip(site.address(x), pair, place, x.width, op.out.width)
        calls.append(site.call(op, "clip", arguments))
    return calls


class VxHeadNorm(Structure):
    """Arguments of `head_norm`; native/head_norm.cpp."""

    _fields_ = [
        *pointers("x q_norm k_norm y"),
        *ints("heads kv_heads head_size across centred values"),
        ("eps", c_float),
    ]


@OPS.add(HeadNorm)
def _head_norm(op: HeadNorm, site: Site) -> list[Call]:
    spec = op.spec
    arguments = VxHeadNorm(
        site.address(op.qkv),
        site.vector(op.q_norm),
        site.vector(op.k_norm),
        site.address(op.out),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_size,
        int(spec.across),
        int(spec.kind == "layer"),
        int(spec.values),
        spec.eps,
    )
    return [site.call(op, "head_norm", arguments)]


class VxGate(Structure):
    """Arguments of `gate`; native/gate.cpp."""

    _fields_ = [*pointers("x g y"), *ints("width span kind")]


@OPS.add(Gate)
def _gate(op: Gate, site: Site) -> list[Call]:
    arguments = VxGate(
        site.address(op.x),
        site.address(op.g),
        site.address(op.out),
        op.x.width,
        op.span,
        GATES[op.kind],
    )
    return [site.call(op, "gate", arguments)]


class VxSlice(Structure):
    """Arguments of `slice`; native/rows.cpp."""

    _fields_ = [("x", c_void_p), ("y", c_void_p), ("stride", c_int32), ("width", c_int32)]


@OPS.add(Slice)
def _slice(op: Slice, site: Site) -> list[Call]:
    first = site.address(op.x) + op.first * 4
    arguments = VxSlice(first, site.address(op.out), op.x.width, op.out.width)
    return [site.call(op, "slice", arguments)]


class VxMagnitude(Structure):
    """Arguments of `match_rms` and `sparsify`; native/rows.cpp."""

    _fields_ = [*pointers("x other y"), ("width", c_int32), ("number", c_float)]


@OPS.add(MatchRms)
def _match_rms(op: MatchRms, site: Site) -> list[Call]:
    places = (site.address(op.x), site.address(op.y), site.address(op.out))
    return [site.call(op, "match_rms", VxMagnitude(*places, op.x.width, FLOOR))]


@OPS.add(Sparsify)
def _sparsify(op: Sparsify, site: Site) -> list[Call]:
    places = (site.address(op.x), None, site.address(op.out))
    return [site.call(op, "sparsify", VxMagnitude(*places, op.x.width, op.deviations))]


class VxResize(Structure):
    """Arguments of `resize`; native/rows.cpp."""

    _fields_ = [*pointers("x y"), *ints("kept size resized runs")]


@OPS.add(Resize)
def _resize(op: Resize, site: Site) -> list[Call]:
    runs = (op.x.width - op.kept) // op.size
    sizes = (op.kept, op.size, op.resized, runs)
    return [site.call(op, "resize", VxResize(site.address(op.x), site.address(op.out), *sizes))]


class VxPool(Structure):
    """Arguments of `pool`; native/pool.cpp."""

    _fields_ = [("x", c_void_p), ("y", c_void_p), ("width", c_int32), ("kind", c_int32)]


@OPS.add(Pool)
def _pool(op: Pool, site: Site) -> list[Call]:
    kind = {"last": 0, "mean": 1, "cls": 2, "max": 3}[op.kind]
    arguments = VxPool(site.address(op.x), site.address(op.out), op.x.width, kind)
    return [site.call(op, "pool", arguments)]


class VxSpread(Structure):
    """Arguments of `spread`; native/spread.cpp."""

    _fields_ = [*pointers("x sources y"), *ints("reduced whole")]


@OPS.add(Spread)
def _spread(op: Spread, site: Site) -> list[Call]:
    arguments = VxSpread(
        site.address(op.x),
        site.vector(op.sources),
        site.address(op.out),
        op.x.width,
        op.out.width,
    )
    return [site.call(op, "spread", arguments)]
