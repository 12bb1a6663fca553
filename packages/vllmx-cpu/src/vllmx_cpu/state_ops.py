"""What the native ops over the states of recurrent layers are called with."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_size_t, c_void_p
from typing import TYPE_CHECKING

import numpy as np
from vllmx_core.model import StateSpec
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.plan import F32
from vllmx_core.state_capacity import StateSlots

from vllmx_cpu.memory import Bytes, allocate
from vllmx_cpu.structs import ACTIVATIONS, NO_ACTIVATION

if TYPE_CHECKING:
    from vllmx_cpu.lower import Site

_MAX_KERNEL, _MAX_KEYS = 16, 2048
"""`MAX_KERNEL` of native/short_conv.cpp; and wider keys leave a thread's scratch memory no room in
native/recurrence.cpp."""


class VxStates(Structure):
    """The states of one layer; native/state.h."""

    _fields_ = [("base", c_void_p), ("slot_bytes", c_size_t)]
    memory: Bytes
    """What they lie in."""


class VxShortConv(Structure):
    """Arguments of `short_conv`; native/short_conv.cpp."""

    _fields_ = [
        ("x", c_void_p), ("w", c_void_p), ("bias", c_void_p), ("y", c_void_p),
        ("states", VxStates), ("channels", c_int32), ("kernel", c_int32), ("activation", c_int32),
    ]  # fmt: skip
    taps: F32
    """What `w` points to."""


class VxRecurrence(Structure):
    """Arguments of `recurrence`; native/recurrence.cpp."""

    _fields_ = [
        ("qkv", c_void_p), ("a", c_void_p), ("b", c_void_p), ("a_log", c_void_p),
        ("dt_bias", c_void_p), ("d", c_void_p), ("out", c_void_p), ("states", VxStates),
        ("heads", c_int32), ("key_heads", c_int32), ("key_size", c_int32), ("value_size", c_int32),
        ("delta", c_int32), ("channels", c_int32), ("tiled", c_int32), ("scale", c_float),
        ("norm_eps", c_float), ("dt_min", c_float), ("dt_max", c_float),
    ]  # fmt: skip


def allocate_states(specs: Sequence[StateSpec], slots: StateSlots) -> tuple[VxStates, ...]:
    """Slots for the states of each layer; those of one slot lie one behind the other."""
    memory = allocate(slots.num_bytes)
    found, start = [], int(memory.ctypes.data)
    for spec in specs:
        states = VxStates(start, slots.slot_bytes)
        states.memory = memory
        found.append(states)
        start += spec.num_bytes
    return tuple(found)


def has_taps(op: ShortConv) -> bool:
    """The kernel keeps the newest tokens in registers."""
    return op.spec.kernel <= _MAX_KERNEL


def has_keys(op: Recurrence) -> bool:
    """Keys of some tokens fit into a thread's scratch memory."""
    return op.spec.key_size <= _MAX_KEYS


def short_conv(op: ShortConv, site: Site) -> VxShortConv:
    """Its arguments. They keep the weights tap by tap, as the kernel reads them."""
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
    return arguments


def recurrence(op: Recurrence, site: Site) -> VxRecurrence:
    """Its arguments."""
    spec = op.spec
    return VxRecurrence(
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
        channels=int(spec.decay == "channel"),
        tiled=int(spec.tiled),
        scale=spec.scale,
        norm_eps=spec.norm_eps,
        dt_min=spec.dt_min,
        dt_max=spec.dt_max,
    )
