"""Ops over the states of recurrent layers."""

from __future__ import annotations

from ctypes import Structure

import numpy as np
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.plan import F32

from vllmx_cpu.kv_cache import VxStates
from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.structs import ACTIVATIONS, NO_ACTIVATION, floats, ints, pointers
from vllmx_cpu.tape import Call

OPS = Table("cpu")
_MAX_KERNEL, _MAX_KEYS = 16, 2048
"""`MAX_KERNEL` of native/short_conv.cpp; and wider keys leave a thread's scratch memory no room in
native/recurrence.cpp."""


class VxShortConv(Structure):
    """Arguments of `short_conv`; native/short_conv.cpp."""

    _fields_ = [*pointers("x w bias y"), ("states", VxStates), *ints("channels kernel activation")]
    taps: F32
    """The numbers that `w` points to."""


class VxRecurrence(Structure):
    """Arguments of `recurrence`; native/recurrence.cpp."""

    _fields_ = [
        *pointers("qkv a b a_log dt_bias d out"),
        ("states", VxStates),
        *ints("heads key_heads key_size value_size delta channels tiled"),
        *floats("scale beta norm_eps dt_min dt_max"),
    ]


def _has_taps(op: ShortConv) -> bool:
    """The kernel keeps the newest tokens in registers."""
    return op.spec.kernel <= _MAX_KERNEL


def _has_keys(op: Recurrence) -> bool:
    """Keys of some tokens fit into a thread's scratch memory."""
    return op.spec.key_size <= _MAX_KEYS


@OPS.add(ShortConv, when=_has_taps)
def _short_conv(op: ShortConv, site: Site) -> list[Call]:
    """The arguments keep the weights tap by tap, as the kernel reads them."""
    spec = op.spec
    by_channel = site.model.weights.vectors[op.w.name].reshape(-1, spec.kernel)
    taps = np.ascontiguousarray(by_channel.T)  # (K, C)
    arguments = VxShortConv(
        x=site.address(op.x),
        w=taps.ctypes.data,
        bias=site.vector(op.bias),
        y=site.address(op.out),
        states=site.model.states[spec.state],
        channels=op.x.width,
        kernel=spec.kernel,
        activation=NO_ACTIVATION if spec.activation is None else ACTIVATIONS[spec.activation],
    )
    arguments.taps = taps
    return [site.call(op, "short_conv", arguments)]


@OPS.add(Recurrence, when=_has_keys)
def _recurrence(op: Recurrence, site: Site) -> list[Call]:
    spec = op.spec
    arguments = VxRecurrence(
        qkv=site.address(op.qkv),
        a=site.address(op.a),
        b=None if op.b is None else site.address(op.b),
        a_log=site.vector(op.a_log),
        dt_bias=site.vector(op.dt_bias),
        d=site.vector(op.d),
        out=site.address(op.out),
        states=site.model.states[spec.state],
        heads=spec.num_heads,
        key_heads=spec.num_key_heads,
        key_size=spec.key_size,
        value_size=spec.value_size,
        delta=int(spec.rule == "delta"),
        channels=0 if spec.decay == "head" else 1 if spec.rule == "delta" else 2,
        tiled=int(spec.tiled),
        scale=spec.scale,
        norm_eps=spec.norm_eps,
        beta=spec.beta,
        dt_min=spec.dt_min,
        dt_max=spec.dt_max,
    )
    return [site.call(op, "recurrence", arguments)]
