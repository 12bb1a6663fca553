"""Calls between the ranks of a model."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_size_t, c_uint32, c_void_p

from vllmx_core.communicator import Communicator, SharedAddresses
from vllmx_core.errors import ConfigError
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.combine import Combine
from vllmx_core.ops.recv import Recv
from vllmx_core.ops.send import Send

from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.structs import ints, pointers
from vllmx_cpu.tape import Call

OPS = Table("cpu")
_BRIDGED_BYTES = 16


class VxWire(Structure):
    """One end of the way from a stage to the next, the arguments of `send` and `recv`."""

    _fields_ = [
        *pointers("abort arrived taken buffers count bridged x"),
        ("buffer_bytes", c_size_t),
        ("width", c_int32),
    ]
    counter: c_uint32

    @classmethod
    def of(cls, shared: SharedAddresses, sender: int) -> VxWire:
        """The way from that rank to the next one; this process is one of both."""
        sender %= shared.num_ranks
        receiver = (sender + 1) % shared.num_ranks
        counter = c_uint32(0)
        wire = cls(
            shared.abort,
            shared.arrived + sender * shared.arrived_stride,
            shared.taken + receiver * shared.arrived_stride,
            shared.buffers + 2 * sender * shared.buffer_bytes,
            ctypes.addressof(counter),
            shared.arrived + shared.rank * shared.arrived_stride + _BRIDGED_BYTES,
            None,
            shared.buffer_bytes,
        )
        wire.counter = counter
        return wire

    def carrying(self, x: int, width: int) -> VxWire:
        """Arguments for an array of that width at this address; all count on together."""
        values = {name: getattr(self, name) for name, *_ in self._fields_}
        return VxWire(**values | {"x": x, "width": width})


class VxRanks(Structure):
    """The struct of native/ranks.cpp by which ranks meet. `counter` is what `count` points to,
    `communicator` keeps the shared memory."""

    _fields_ = [
        *pointers("abort arrived buffers count"),
        ("arrived_stride", c_size_t),
        ("buffer_bytes", c_size_t),
        *ints("rank ranks"),
    ]
    counter: c_uint32
    communicator: Communicator
    sends: VxWire | None = None
    receives: VxWire | None = None
    """The ways to and from other stages, where there are some."""


class VxAllReduce(Structure):
    """Arguments of `all_reduce`."""

    _fields_ = [("all", VxRanks), ("x", c_void_p), ("y", c_void_p), ("width", c_int32)]


class VxCombine(Structure):
    """Arguments of `combine`; `held` is what `ends` points to."""

    _fields_ = [("all", VxRanks), *pointers("x y ids ends"), *ints("width chosen")]
    held: ctypes.Array[c_int32]


class VxAllGather(Structure):
    """Arguments of `all_gather`; `held` is what `widths` points to."""

    _fields_ = [("all", VxRanks), ("x", c_void_p), ("y", c_void_p), ("widths", c_void_p)]
    held: ctypes.Array[c_int32]


def ranks_of(communicator: Communicator | None) -> VxRanks | None:
    """Fills the struct by which the ranks of a model meet; None for a model of one. Raises
    ConfigError for ranks that share no memory."""
    if communicator is None:
        return None
    shared = communicator.shared
    if shared is None:
        raise ConfigError(
            "ranks of backend 'cpu' must share memory: start them by --tensor-parallel-size or"
            " --pipeline-parallel-size",
            param="tensor_parallel_size",
        )
    counter = c_uint32(0)
    ranks = VxRanks(
        shared.abort,
        shared.arrived,
        shared.buffers,
        ctypes.addressof(counter),
        shared.arrived_stride,
        shared.buffer_bytes,
        shared.rank,
        shared.num_ranks,
    )
    ranks.counter, ranks.communicator = counter, communicator
    if shared.stages is not None:
        ranks.sends = VxWire.of(shared.stages, shared.stages.rank)
        ranks.receives = VxWire.of(shared.stages, shared.stages.rank - 1)
    return ranks


@OPS.add(AllReduce)
def _all_reduce(op: AllReduce, site: Site) -> list[Call]:
    arguments = VxAllReduce(_meeting(site), site.address(op.x), site.address(op.out), op.x.width)
    return [site.call(op, "all_reduce", arguments)]


@OPS.add(Combine)
def _combine(op: Combine, site: Site) -> list[Call]:
    ends = (c_int32 * len(op.ends))(*op.ends)
    arguments = VxCombine(
        _meeting(site),
        site.address(op.x),
        site.address(op.out),
        site.address(op.ids),
        ctypes.addressof(ends),
        op.x.width,
        op.ids.width,
    )
    arguments.held = ends
    return [site.call(op, "combine", arguments)]


@OPS.add(AllGather)
def _all_gather(op: AllGather, site: Site) -> list[Call]:
    widths = (c_int32 * len(op.widths))(*op.widths)
    arguments = VxAllGather(
        _meeting(site), site.address(op.x), site.address(op.out), ctypes.addressof(widths)
    )
    arguments.held = widths
    return [site.call(op, "all_gather", arguments)]


@OPS.add(Send)
def _send(op: Send, site: Site) -> list[Call]:
    wire = _meeting(site).sends
    assert wire is not None, "a rank of one stage sends nothing on"
    return [site.call(op, "send", wire.carrying(site.address(op.x), op.x.width))]


@OPS.add(Recv)
def _recv(op: Recv, site: Site) -> list[Call]:
    wire = _meeting(site).receives
    assert wire is not None, "a rank of one stage receives nothing"
    return [site.call(op, "recv", wire.carrying(site.address(op.out), op.out.width))]


def _meeting(site: Site) -> VxRanks:
    ranks = site.model.ranks
    assert isinstance(ranks, VxRanks), "an op between ranks needs a communicator"
    return ranks
