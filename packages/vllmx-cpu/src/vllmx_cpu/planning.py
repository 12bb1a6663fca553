"""What loading a model will take, decided before a single weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllmx_core.arena import ArenaPlan, plan_arena
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import CapacityError
from vllmx_core.kv_quant import kv_dtype
from vllmx_core.memory import format_bytes, free_bytes
from vllmx_core.model import Model
from vllmx_core.plan import AnyArray
from vllmx_core.tape import Node, RecordedInputs, Recorder, Rows, Value, WeightRef
from vllmx_core.weights import WeightSource, WeightSpec

from vllmx_cpu.fuse import fuse, gated_weights
from vllmx_cpu.kinds import segments
from vllmx_cpu.kv_cache import KVPlan, plan_kv
from vllmx_cpu.loaded import Forward, bound_forward
from vllmx_cpu.native import library
from vllmx_cpu.packing import MatrixShape, matrix_shapes, packed_bytes
from vllmx_cpu.structs import KV_DTYPES

LOGITS_BYTES = 256 << 20
"""Logit buffers beyond one row a sequence (prompt logprobs) grow to this size."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The recorded and fused step, and the sizes of everything that it needs."""

    forward: Forward
    nodes: Sequence[Node]
    logits: Value
    specs: Sequence[WeightSpec]
    """The weight map, with matrices of several types cut."""
    segments: Mapping[str, Sequence[str]]
    """Names in `specs` of each matrix of the map, one below the other."""
    shapes: Mapping[str, MatrixShape]
    max_rows: Mapping[Rows, int]
    arena: ArenaPlan
    panel_bytes: int
    workspace_bytes: int
    kv: KVPlan
    constants: Mapping[str, AnyArray]

    @property
    def activation_bytes(self) -> int:
        return self.arena.num_bytes + self.panel_bytes + self.workspace_bytes


def plan_load(
    model: Model, source: WeightSource, options: LoadOptions, dtype: str, num_threads: int
) -> LoadPlan:
    """Records the model's step and sizes it. Raises CapacityError when weights or one sequence of
    max_model_len do not fit into the memory that is free."""
    constants = model.constants(options.max_model_len)
    forward = bound_forward(model, _weight_refs(model, constants))
    recorder = Recorder()
    logits = forward(recorder, RecordedInputs())
    # float32 asks for float32 throughout: no activation is rounded to int8 then.
    kept = None if dtype == "f32" else source
    gated = gated_weights(recorder.nodes)
    cut = {
        spec.name: (spec,) if kept is None else segments(spec, kept, gated)
        for spec in model.weights()
    }
    specs = [spec for group in cut.values() for spec in group]
    shapes = matrix_shapes(specs, dtype, gated, kept)
    nodes = fuse(recorder.nodes)
    max_rows = _max_rows(options, model.shape.vocab_size)
    arena = plan_arena(nodes, lambda value: value.width * max_rows[value.rows] * 4, [logits])
    panel_bytes = _panel_bytes(nodes, max_rows)
    workspace_bytes = _workspace_bytes(nodes, options, num_threads)
    free = free_bytes()
    weight_bytes = packed_bytes(specs, shapes)
    if weight_bytes > free:
        raise CapacityError(
            f"the weights take {format_bytes(weight_bytes)} as {dtype}, {format_bytes(free)} of"
            " memory are free: choose a smaller or quantised model, or a 16-bit --dtype"
        )
    used = weight_bytes + arena.num_bytes + panel_bytes + workspace_bytes
    automatic = "f32" if dtype == "f32" else "bf16"
    cached = kv_dtype(options.kv_cache_dtype, KV_DTYPES, automatic, "cpu")
    kv = plan_kv(model.shape.kv, options, cached, free, used)
    return LoadPlan(
        forward, nodes, logits, specs,
        {name: [spec.name for spec in group] for name, group in cut.items()},
        shapes, max_rows, arena, panel_bytes, workspace_bytes, kv, constants,
    )  # fmt: skip


def _weight_refs(model: Model, constants: Mapping[str, AnyArray]) -> dict[str, WeightRef]:
    refs = {spec.name: WeightRef(spec.name, spec.rows, spec.cols) for spec in model.weights()}
    for name, table in constants.items():
        refs[name] = WeightRef(name, table.shape[0], table.shape[-1] if table.ndim > 1 else 0)
    return refs


def _max_rows(options: LoadOptions, vocab_size: int) -> dict[Rows, int]:
    tokens = max(options.max_num_batched_tokens, options.num_seqs)
    rows = max(options.num_seqs, LOGITS_BYTES // (4 * vocab_size))
    return {"T": tokens, "L": min(tokens, rows)}


def _panel_bytes(nodes: Sequence[Node], max_rows: Mapping[Rows, int]) -> int:
    """Four bytes a column and fewer, in whole units."""
    linears = [node for node in nodes if node.op == "linear"]
    return max(
        (max_rows[n.writes[0].rows] * (n.reads[0].width // 256 + 1) * 1024 for n in linears),
        default=0,
    )


def _workspace_bytes(nodes: Sequence[Node], options: LoadOptions, num_threads: int) -> int:
    specs = [node.options["spec"] for node in nodes if node.op == "attention"]
    return max(
        (
            int(
                library().vx_attention_workspace_bytes(
                    spec.num_heads, spec.num_kv_heads, spec.head_size, options.max_model_len,
                    num_threads,
                )
            )
            for spec in specs
        ),
        default=0,
    )  # fmt: skip
