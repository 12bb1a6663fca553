"""Ops of towers, the store of features, and rotations with axes."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_void_p

from vllmx_core.ops.cross_attention import CrossAttention
from vllmx_core.ops.downsample import Downsample
from vllmx_core.ops.keep import Keep
from vllmx_core.ops.merge import Merge
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.patches import Patches
from vllmx_core.ops.place import Place
from vllmx_core.ops.tap import Tap
from vllmx_core.ops.unfold import Unfold
from vllmx_core.ops.values import WeightRef

from vllmx_cpu.lowering.site import Lowering, Site, Table
from vllmx_cpu.native import SCRATCH_BYTES
from vllmx_cpu.structs import VxElementwise, VxWeight, ints, pointers
from vllmx_cpu.tape import Call

OPS = Table("cpu")
_MOST_CROSS_FEATURES = 512
"""Features of a head that native/cross_attention.cpp has room for."""


class VxTurn(Structure):
    """Arguments of `turn`; native/images.cpp."""

    _fields_ = [*pointers("images table axes y"), ("half", c_int32)]


class VxPatches(Structure):
    """Arguments of `patches`; native/images.cpp."""

    _fields_ = [("images", c_void_p), ("y", c_void_p), ("width", c_int32)]


class VxMix(Structure):
    """Arguments of `mix`; native/rows.cpp."""

    _fields_ = [("w", VxWeight), *pointers("constant images y")]


class VxMerge(Structure):
    """Arguments of `merge`; native/images.cpp."""

    _fields_ = [("x", c_void_p), ("y", c_void_p), ("width", c_int32), ("count", c_int32)]


class VxFeatures(Structure):
    """Arguments of `keep`, `tap` and `place`; native/images.cpp."""

    _fields_ = [*pointers("images x y store"), *ints("width adds own")]


class VxCrossAttention(Structure):
    """Arguments of `cross_attention`; native/cross_attention.cpp."""

    _fields_ = [
        *pointers("images q y keys values"),
        *ints("num_heads head_size"),
        ("scale", c_float),
    ]


class VxUnfold(Structure):
    """Arguments of `unfold`; native/cross_attention.cpp."""

    _fields_ = [*pointers("x y out"), *ints("channels x_frames y_frames first")]


class VxDownsample(Structure):
    """Arguments of `downsample`; native/downsample.cpp."""

    _fields_ = [("w", VxWeight * 3), *pointers("x y panels workspace"), *ints("frames bins")]

    @property
    def products(self) -> float:
        """Multiplications for a row of x."""
        times, bins, found = int(self.frames), int(self.bins), 0
        for w in self.w:
            times, bins = -(-times // 2), -(-bins // 2)
            found += times * bins * int(w.rows) * int(w.cols)
        return found / times


def turns(model: Lowering) -> list[Call]:
    """The calls in front of a tape: what rotations with axes turn its tokens by."""
    calls = []
    for turned in model.turned.values():
        arguments = VxTurn(
            ctypes.addressof(model.images),
            model.vector(turned.table),
            turned.axes.ctypes.data,
            turned.values.ctypes.data,
            turned.axes.size,
        )
        calls.append(Call("turn", model.isa.op("turn", VxTurn), arguments))
    return calls


def rotation(
    rope: WeightRef | None, axes: tuple[int, ...], site: Site
) -> tuple[int | None, int | None]:
    """The table that attention reads, and the row of it for each token: None for the positions."""
    if rope is None or not axes:
        return site.vector(rope), None
    turned = site.model.turned[rope.name, axes]
    return turned.values.ctypes.data, turned.rows.ctypes.data


@OPS.add(Patches)
def _patches(op: Patches, site: Site) -> list[Call]:
    arguments = VxPatches(images(site), site.address(op.out), op.out.width)
    return [site.call(op, "patches", arguments)]


@OPS.add(Mix, when=lambda op: op.out.width * 4 <= SCRATCH_BYTES)
def _mix(op: Mix, site: Site) -> list[Call]:
    constant = site.vector(op.w) if op.w.kind == "constant" else None
    if constant is None:
        table = site.model.weights.matrices[op.w.name].struct()
    else:
        table = VxWeight(cols=op.w.cols)
    arguments = VxMix(table, constant, images(site), site.address(op.out))
    return [site.call(op, "mix", arguments)]


@OPS.add(Merge)
def _merge(op: Merge, site: Site) -> list[Call]:
    x, y = site.address(op.x), site.address(op.out)
    if op.kind == "join":  # rows side by side lie in memory as they do one below the other
        copy = VxElementwise(x=x, y=y, width=op.x.width, factor=1.0)
        return [site.call(op, "scale", copy)]
    return [site.call(op, "merge", VxMerge(x, y, op.x.width, op.count))]


@OPS.add(Keep)
def _keep(op: Keep, site: Site) -> list[Call]:
    store = site.model.features[op.part].ctypes.data
    arguments = VxFeatures(images(site), site.address(op.x), None, store, op.x.width, 0)
    return [site.call(op, "keep", arguments)]


@OPS.add(Tap)
def _tap(op: Tap, site: Site) -> list[Call]:
    store = site.model.features[op.part].ctypes.data
    arguments = VxFeatures(images(site), site.address(op.x), None, store, op.x.width, 0)
    return [site.call(op, "tap", arguments)]


@OPS.add(Place)
def _place(op: Place, site: Site) -> list[Call]:
    store = site.model.features[op.part].ctypes.data
    arguments = VxFeatures(
        images(site),
        site.address(op.x),
        site.address(op.out),
        store,
        op.x.width,
        int(op.adds),
        int(op.own),
    )
    return [site.call(op, "place", arguments)]


@OPS.add(CrossAttention, when=lambda op: op.spec.head_size <= _MOST_CROSS_FEATURES)
def _cross_attention(op: CrossAttention, site: Site) -> list[Call]:
    spec, store = op.spec, site.model.features
    arguments = VxCrossAttention(
        images(site),
        site.address(op.q),
        site.address(op.out),
        store[spec.keys].ctypes.data,
        store[spec.values].ctypes.data,
        spec.num_heads,
        spec.head_size,
        spec.scale,
    )
    return [site.call(op, "cross_attention", arguments)]


@OPS.add(Unfold)
def _unfold(op: Unfold, site: Site) -> list[Call]:
    x_frames = op.x.width // op.channels
    arguments = VxUnfold(
        site.address(op.x),
        None if op.y is None else site.address(op.y),
        site.address(op.out),
        op.channels,
        x_frames,
        op.frames - x_frames,
        op.first,
    )
    return [site.call(op, "unfold", arguments)]


def downsampled_numbers(op: Downsample) -> int:
    """The float32 numbers of its workspace: what two convolutions leave of a chunk, and the values
    that one of the three reads."""
    made = [times * bins for times, bins in op.sizes[1:]]
    read = max(count * w.cols for count, w in zip(made, op.matrices, strict=True))
    return made[0] * op.first.rows + made[1] * op.second.rows + read


@OPS.add(Downsample)
def _downsample(op: Downsample, site: Site) -> list[Call]:
    matrices = [site.model.weights.matrices[w.name].struct() for w in op.matrices]
    arguments = VxDownsample(
        (VxWeight * 3)(*matrices),
        site.address(op.x),
        site.address(op.out),
        site.model.panels.ctypes.data,
        site.model.workspace.ctypes.data,
        *op.sizes[0],
    )
    return [site.call(op, "downsample", arguments)]


def images(site: Site) -> int:
    """The address at which ops find what the running step has for models that see."""
    return ctypes.addressof(site.model.images)
