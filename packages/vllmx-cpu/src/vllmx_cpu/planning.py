"""Plans the memory of a model, decided before a single weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllmx_core.adapters import AdapterTargets
from vllmx_core.backend import LoadOptions
from vllmx_core.backend_kit.hidden import shared_matrices
from vllmx_core.backend_kit.limits import check_weights_fit, feature_bytes, step_limits
from vllmx_core.cache.capacity import CachePlan
from vllmx_core.kv_dtypes import kv_dtype
from vllmx_core.model import Model, encoder_of
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.op import OpList
from vllmx_core.ops.values import Rows
from vllmx_core.plan import AnyArray
from vllmx_core.recorded.passes import fuse_activations, fuse_gated_linears, gated_weights
from vllmx_core.recorded.recording import prepare
from vllmx_core.records import Record
from vllmx_core.system.memory import free_bytes
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec

from vllmx_cpu.adapters import CpuAdapters
from vllmx_cpu.kinds import segments
from vllmx_cpu.kv_cache import plan_kv
from vllmx_cpu.lowering.table import OPS
from vllmx_cpu.packing import MatrixShape, matrix_shapes, packed_bytes
from vllmx_cpu.room import Extent, Room, plan_room
from vllmx_cpu.structs import KV_DTYPES

PATCHES_OF_WINDOW = 16
"""The patches that a window has at the least, on an average of an image: those at its edges may
have fewer."""


class TowerSizes(Record):
    """The recorded pass over images, and how large one is."""

    ops: OpList
    patches_per_token: int
    shapes: Mapping[str, MatrixShape]
    num_threads: int
    kv_dtype: str

    def room(self, num_patches: int, num_images: int, num_windows: int) -> Room:
        """Makes room for a pass over so many."""
        rows: Mapping[Rows, int] = {"T": num_patches, "L": num_patches // self.patches_per_token}
        extent = Extent(rows, num_images, num_patches, num_windows)
        return plan_room(self.ops, extent, self.shapes, self.num_threads, self.kv_dtype)


class LoadSizes(Record):
    """The recorded step, and the sizes of everything that it needs."""

    recorded: OpList
    fused: OpList
    specs: Sequence[WeightSpec]
    """The weight map, with matrices of several types cut."""
    segments: Mapping[str, Sequence[str]]
    """Names in `specs` of each matrix of the map, one below the other."""
    shapes: Mapping[str, MatrixShape]
    max_rows: Mapping[Rows, int]
    room: Room
    kv: CachePlan
    constants: Mapping[str, AnyArray]
    tower: TowerSizes | None
    """Set where the model sees images."""
    adapters: CpuAdapters | None
    """Set where rows may use adapters."""


def load_sizes(
    model: Model, source: WeightSource, options: LoadOptions, dtype: str, num_threads: int
) -> LoadSizes:
    """Records the model's step and sizes it. Raises CapacityError when weights or one sequence of
    max_model_len do not fit into the memory that is free."""
    adapts = options.adapters is not None
    recording = prepare(model, options.max_model_len, "cpu", OPS.supports, adapts=adapts)
    recorded = recording.steps
    # float32 asks for float32 throughout: no activation is rounded to int8 then.
    kept = None if dtype == "f32" else source
    passes = [recorded] if recording.tower is None else [recorded, recording.tower]
    fusible = frozenset[str]().union(*map(gated_weights, passes))
    gated = fusible | _gated_stacks(recorded)
    cut = {
        spec.name: (spec,) if kept is None else segments(spec, kept, gated)
        for spec in recording.specs
    }
    specs = [spec for group in cut.values() for spec in group]
    shapes = matrix_shapes(specs, dtype, gated, kept)
    fused = fuse_activations(fuse_gated_linears(recorded, fusible))
    max_rows = step_limits(options, model.shape.limited_row)
    cached = kv_dtype(options.kv_cache_dtype, KV_DTYPES, dtype, "cpu")
    extent = Extent(max_rows, options.num_seqs, options.max_model_len)
    adapters, adapter_bytes = None, 0
    if options.adapters is not None:
        targets = AdapterTargets(recording.specs, recorded.ops)
        adapters = CpuAdapters(options.adapters, targets, half=dtype != "f32")
        adapter_bytes = targets.num_bytes(options.adapters, 4 if dtype == "f32" else 2)
    room = plan_room(fused, extent, shapes, num_threads, cached, adapters)
    tower = None
    if recording.tower is not None and (encoder := encoder_of(model)) is not None:
        ops = fuse_activations(fuse_gated_linears(recording.tower, fusible))
        tower = TowerSizes(ops, encoder.patches_per_token, shapes, num_threads, cached)
    free = options.free_bytes or free_bytes()
    weight_bytes = packed_bytes(specs, shapes, shared_matrices(options.hidden))
    remedy = "choose a smaller or quantised model, or a 16-bit --dtype"
    check_weights_fit(weight_bytes, free, dtype, remedy=remedy)
    used = weight_bytes + room.num_bytes + feature_bytes(model.shape, options) + adapter_bytes
    if tower is not None:  # a step's images; room for more is made when they come
        patches = min(max_rows["T"], options.max_model_len) * tower.patches_per_token
        used += tower.room(patches, 1, patches // PATCHES_OF_WINDOW).num_bytes
    kv = plan_kv(model.shape, options, cached, free, used)
    return LoadSizes(
        recorded,
        fused,
        specs,
        {name: [spec.name for spec in group] for name, group in cut.items()},
        shapes,
        max_rows,
        room,
        kv,
        recording.constants,
        tower,
        adapters,
    )


def _gated_stacks(steps: OpList) -> frozenset[str]:
    experts = [op for op in steps.ops if isinstance(op, Experts)]
    return frozenset(op.gate_up.name for op in experts if op.spec.gated)
