"""Memory that the ops of a loaded model point to, and the calls of native functions made of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

from vllmx_core.ops.op import Op
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.plan import F32
from vllmx_core.recorded.op_table import OpTable
from vllmx_core.records import Record

from vllmx_cpu.adapters import CpuAdapters
from vllmx_cpu.images import Rotation, Turned, VxImages
from vllmx_cpu.kv_cache import LayerPages, VxStates
from vllmx_cpu.memory import Bytes
from vllmx_cpu.native import Isa
from vllmx_cpu.packing import LoadedWeights
from vllmx_cpu.tape import Call

Address = Callable[[Value], int]


class Lowering(Record):
    """Memory that the ops of one loaded model point to."""

    isa: Isa
    weights: LoadedWeights
    segments: Mapping[str, Sequence[str]]
    """Names of the matrices that make up a weight, one below the other."""
    pages: tuple[LayerPages, ...]
    states: tuple[VxStates, ...]
    block_size: int
    kv_dtype: str
    panels: Bytes
    """Packed activations of the largest product; in use only inside one op."""
    workspace: Bytes
    """The scratch memory of attention and experts; in use only inside one op."""
    images: VxImages
    """The images of the step that runs, for models that see."""
    turned: Mapping[Rotation, Turned]
    features: tuple[F32, ...]
    """(rows, E) of each part of the store."""
    adapters: CpuAdapters | None = None
    """Set where rows may use adapters."""
    ranks: ctypes.Structure | None = None
    """The place where ranks of the model meet, a `vllmx_cpu.lowering.ranks.VxRanks`."""

    def vector(self, ref: WeightRef) -> int:
        """The address of a vector or a constant."""
        return int(self.weights.vectors[ref.name].ctypes.data)


class Site(Record):
    """The surroundings of an op that is lowered: what the model has, and where its values lie."""

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
        return self.model.vector(ref)


Table = OpTable[Site, list[Call]]
"""Each family of ops has one: more calls than one where a weight has several segments."""
