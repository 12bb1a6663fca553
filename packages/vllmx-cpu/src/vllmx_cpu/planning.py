"""What loading a model will take, decided before a single weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllmx_core.arena import ArenaPlan, plan_arena
from vllmx_core.backend import LoadOptions
from vllmx_core.backend_kit.limits import check_weights_fit, step_limits
from vllmx_core.kv_capacity import CachePlan
from vllmx_core.kv_quant import kv_dtype
from vllmx_core.memory import free_bytes
from vllmx_core.model import Model
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.head import Head
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import OpList
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.values import Rows
from vllmx_core.passes.gated_linear import fuse_gated_linears, gated_weights
from vllmx_core.plan import AnyArray
from vllmx_core.recording import prepare
from vllmx_core.weights import WeightSource, WeightSpec

from vllmx_cpu.kinds import segments
from vllmx_cpu.kv_cache import plan_kv
from vllmx_cpu.lowering.attention import segment_dtype
from vllmx_cpu.lowering.table import OPS
from vllmx_cpu.native import library
from vllmx_cpu.packing import MatrixShape, matrix_shapes, packed_bytes
from vllmx_cpu.structs import KV_DTYPES, WEIGHT_KINDS


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The recorded step, and the sizes of everything that it needs."""

    recorded: OpList
    fused: OpList
    specs: Sequence[WeightSpec]
    """The weight map, with matrices of several types cut."""
    segments: Mapping[str, Sequence[str]]
    """Names in `specs` of each matrix of the map, one below the other."""
    shapes: Mapping[str, MatrixShape]
    max_rows: Mapping[Rows, int]
    arena: ArenaPlan
    panel_bytes: int
    workspace_bytes: int
    kv: CachePlan
    constants: Mapping[str, AnyArray]

    @property
    def activation_bytes(self) -> int:
        return self.arena.num_bytes + self.panel_bytes + self.workspace_bytes


def plan_load(
    model: Model, source: WeightSource, options: LoadOptions, dtype: str, num_threads: int
) -> LoadPlan:
    """Records the model's step and sizes it. Raises CapacityError when weights or one sequence of
    max_model_len do not fit into the memory that is free."""
    recording = prepare(model, options.max_model_len, "cpu", OPS.supports)
    recorded = recording.steps
    # float32 asks for float32 throughout: no activation is rounded to int8 then.
    kept = None if dtype == "f32" else source
    fusible = gated_weights(recorded)
    gated = fusible | _gated_stacks(recorded)
    cut = {
        spec.name: (spec,) if kept is None else segments(spec, kept, gated)
        for spec in recording.specs
    }
    specs = [spec for group in cut.values() for spec in group]
    shapes = matrix_shapes(specs, dtype, gated, kept)
    fused = fuse_gated_linears(recorded, fusible)
    max_rows = step_limits(options, model.shape.vocab_size)
    arena = plan_arena(
        fused.ops, lambda value: value.width * max_rows[value.rows] * 4, [fused.logits]
    )
    panel_bytes = _panel_bytes(fused, max_rows, shapes)
    cached = kv_dtype(options.kv_cache_dtype, KV_DTYPES, dtype, "cpu")
    workspace_bytes = _workspace_bytes(fused, options, max_rows["T"], num_threads, cached)
    free = free_bytes()
    weight_bytes = packed_bytes(specs, shapes)
    remedy = "choose a smaller or quantised model, or a 16-bit --dtype"
    check_weights_fit(weight_bytes, free, dtype, remedy=remedy)
    used = weight_bytes + arena.num_bytes + panel_bytes + workspace_bytes
    kv = plan_kv(model.shape, options, cached, free, used)
    return LoadPlan(
        recorded, fused, specs,
        {name: [spec.name for spec in group] for name, group in cut.items()},
        shapes, max_rows, arena, panel_bytes, workspace_bytes, kv, recording.constants,
    )  # fmt: skip


def _gated_stacks(steps: OpList) -> frozenset[str]:
    experts = [op for op in steps.ops if isinstance(op, Experts)]
    return frozenset(op.gate_up.name for op in experts if op.spec.gated)


def _panel_bytes(
    steps: OpList, max_rows: Mapping[Rows, int], shapes: Mapping[str, MatrixShape]
) -> int:
    """Four bytes a column and fewer, in whole units; experts have many rows and a closer bound."""
    largest = 0
    for op in steps.ops:
        if isinstance(op, Linear | GatedLinear | Head):
            largest = max(largest, max_rows[op.out.rows] * (op.x.width // 256 + 1) * 1024)
        elif isinstance(op, Experts):
            rows = max_rows["T"] * op.ids.width
            of_stacks = (
                library().vx_panels_bytes(WEIGHT_KINDS[shape.kind], shape.cols, rows)
                for shape in (shapes[op.gate_up.name], shapes[op.down.name])
            )
            largest = max(largest, *of_stacks)
        elif isinstance(op, LatentAttention):
            rows = library().vx_latent_rows(op.spec.num_heads, max_rows["T"])
            of_heads = (
                library().vx_panels_bytes(WEIGHT_KINDS[shape.kind], shape.cols, rows)
                for shape in (shapes[op.k_b.name], shapes[op.v_b.name])
            )
            largest = max(largest, *of_heads)
    return largest


def _workspace_bytes(
    steps: OpList, options: LoadOptions, max_tokens: int, num_threads: int, cached: str
) -> int:
    largest = 0
    for op in steps.ops:
        if isinstance(op, Attention):
            spec = op.spec
            needed = library().vx_attention_workspace_bytes(
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_size,
                options.max_model_len,
                num_threads,
            )
        elif isinstance(op, LatentAttention):
            latent = op.spec
            needed = library().vx_latent_workspace_bytes(
                latent.num_heads, latent.rank, latent.nope_size, latent.value_size,
                options.max_model_len, num_threads,
            )  # fmt: skip
        elif isinstance(op, SegmentAttention):
            needed = library().vx_segment_workspace_bytes(
                op.spec.num_kv_heads, op.spec.head_size, max_tokens, options.num_seqs,
                options.max_model_len, KV_DTYPES[segment_dtype(cached)],
            )  # fmt: skip
        elif isinstance(op, Experts):
            needed = library().vx_experts_workspace_bytes(
                max_tokens, op.ids.width, op.inner, op.x.width, op.gate_up.count, num_threads
            )
        else:
            continue
        largest = max(largest, int(needed))
    return largest
