"""The backend "cpu": numpy buffers, native kernels, one recorded tape a model."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from pathlib import Path

from vllmx_core.backend import Communicator, LoadedInfo, LoadOptions
from vllmx_core.cores import available_cores
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.memory import format_bytes, free_bytes
from vllmx_core.model import Model
from vllmx_core.weights import WeightSource

from vllmx_cpu import native
from vllmx_cpu.arena import ArenaPlan, plan_arena
from vllmx_cpu.fuse import fuse, gated_weights
from vllmx_cpu.kv_cache import KVPlan, kv_dtype, plan_kv
from vllmx_cpu.loaded import CpuLoadedModel, Forward, RecordedStep, bound_forward
from vllmx_cpu.lower import Lowering, lower_all, make_tape
from vllmx_cpu.memory import allocate
from vllmx_cpu.packing import MatrixShape, load_weights, matrix_shapes, packed_bytes
from vllmx_cpu.structs import VX_DTYPES
from vllmx_cpu.tape import Node, RecordedInputs, Recorder, Rows, Value, WeightRef

logger = logging.getLogger("vllmx.cpu")

DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32",
}  # fmt: skip
MAX_THREADS = 256
LOGITS_BYTES = 256 << 20
"""Logit buffers beyond one row a sequence (prompt logprobs) grow to this size."""


class CpuBackend:
    """`vllmx_core.backend.Backend` for x86-64 and 64-bit ARM."""

    @property
    def name(self) -> str:
        return "cpu"

    def environment(self) -> dict[str, str]:
        """Processor, instruction sets, compiler, threads, memory."""
        isas = native.instruction_sets()
        return {
            "processor": _processor(),
            "instruction set": native.choose_isa().name,
            "instruction sets": ", ".join(isa.name for isa in isas if isa.supported),
            "compiled by": native.library().vx_compiler().decode(),
            "threads": str(available_cores()),
            "free memory": format_bytes(free_bytes()),
        }

    def load(
        self,
        model: Model,
        source: WeightSource,
        options: LoadOptions,
        comm: Communicator | None = None,
    ) -> CpuLoadedModel:
        """See `vllmx_core.backend.Backend.load`."""
        if comm is not None and comm.world_size > 1:
            raise ConfigError(
                f"the CPU backend runs on one rank, {comm.world_size} were asked for: install"
                " vllmx-tp or set --tensor-parallel-size 1",
                param="tensor_parallel_size",
            )
        isa = native.choose_isa()
        dtype = _dtype(options, model)
        threads = _num_threads(options)
        refs = _weight_refs(model, options)
        forward = bound_forward(model, refs)
        nodes, logits = _record(forward)
        shapes = matrix_shapes(model.weights(), dtype, gated_weights(nodes))
        fused = fuse(nodes)
        max_rows = _max_rows(options, model.shape.vocab_size)
        arena_plan = plan_arena(fused, max_rows, [logits])
        panel_bytes = _panel_bytes(fused, max_rows)
        kv, workspace_bytes = _plan_memory(
            model, options, dtype, shapes, arena_plan.num_bytes + panel_bytes, fused, threads
        )
        weights = load_weights(
            model.weights(), model.constants(options.max_model_len), source, shapes,
            num_threads=threads, progress=options.progress,
        )  # fmt: skip
        lowering = Lowering(
            isa.kernels, weights, kv.allocate(), kv.block_size, kv.dtype, allocate(panel_bytes),
            allocate(workspace_bytes),
        )  # fmt: skip
        recorded = None
        if not options.enforce_eager:
            recorded = _lower(lowering, fused, arena_plan, logits)
        info = LoadedInfo(
            backend=self.name,
            device=_processor(),
            dtype=dtype,
            kv_cache_dtype=kv.dtype,
            block_size=kv.block_size,
            num_kv_blocks=kv.num_blocks,
            max_num_batched_tokens=max_rows["T"],
            max_logit_rows=max_rows["L"],
            weight_bytes=weights.num_bytes,
            kv_cache_bytes=kv.num_bytes,
            details={
                "instruction set": isa.name, "threads": threads, "ops": len(fused),
                "activation buffers": format_bytes(arena_plan.num_bytes + panel_bytes),
            },
        )  # fmt: skip
        logger.info("loaded on %s with %s, %d threads", info.device, isa.name, threads)
        vocab_size = model.shape.vocab_size
        sampler_bytes = native.library().vx_sampler_workspace_bytes(vocab_size, threads)
        return CpuLoadedModel(
            info, native.Team(threads), lowering, vocab_size, allocate(sampler_bytes), recorded,
            forward,
        )  # fmt: skip


def _dtype(options: LoadOptions, model: Model) -> str:
    """auto is the checkpoint's. Raises ConfigError for one that the kernels do not have."""
    wanted = model.shape.dtype if options.dtype == "auto" else options.dtype
    wanted = DTYPES.get(wanted, wanted)
    if wanted not in VX_DTYPES:
        raise ConfigError(
            f"the CPU backend cannot compute in dtype {wanted!r}: choose {', '.join(VX_DTYPES)}",
            param="dtype",
        )
    return wanted


def _num_threads(options: LoadOptions) -> int:
    if options.num_threads is None:
        return min(available_cores(), MAX_THREADS)
    if not 1 <= options.num_threads <= MAX_THREADS:
        raise ConfigError(
            f"num_threads must be between 1 and {MAX_THREADS}, got {options.num_threads}",
            param="num_threads",
        )
    return options.num_threads


def _weight_refs(model: Model, options: LoadOptions) -> dict[str, WeightRef]:
    refs = {spec.name: WeightRef(spec.name, spec.rows, spec.cols, spec) for spec in model.weights()}
    for name, table in model.constants(options.max_model_len).items():
        refs[name] = WeightRef(name, table.shape[0], table.shape[-1] if table.ndim > 1 else 0)
    return refs


def _record(forward: Forward) -> tuple[list[Node], Value]:
    recorder = Recorder()
    logits = forward(recorder, RecordedInputs())
    return recorder.nodes, logits


def _max_rows(options: LoadOptions, vocab_size: int) -> dict[Rows, int]:
    tokens = max(options.max_num_batched_tokens, options.max_num_seqs)
    rows = max(options.max_num_seqs, LOGITS_BYTES // (4 * vocab_size))
    return {"T": tokens, "L": min(tokens, rows)}


def _panel_bytes(nodes: Sequence[Node], max_rows: dict[Rows, int]) -> int:
    linears = [node for node in nodes if node.op == "linear"]
    return max(
        (max_rows[node.writes[0].rows] * (node.reads[0].width + 1) * 4 for node in linears),
        default=0,
    )


def _plan_memory(
    model: Model,
    options: LoadOptions,
    dtype: str,
    shapes: dict[str, MatrixShape],
    activation_bytes: int,
    nodes: Sequence[Node],
    threads: int,
) -> tuple[KVPlan, int]:
    """The KV cache and the attention's workspace. Raises CapacityError before anything is read."""
    free = free_bytes()
    weight_bytes = packed_bytes(model.weights(), shapes)
    if weight_bytes > free:
        raise CapacityError(
            f"the weights take {format_bytes(weight_bytes)} as {dtype}, {format_bytes(free)} of"
            " memory are free: choose a smaller or quantised model, or a 16-bit --dtype"
        )
    lib, workspace = native.library(), 0
    for node in nodes:
        if node.op == "attention":
            spec = node.options["spec"]
            sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, options.max_model_len)
            workspace = max(workspace, lib.vx_attention_workspace_bytes(*sizes, threads))
    used = weight_bytes + activation_bytes + workspace
    kv = plan_kv(model.shape.kv, options, kv_dtype(options, dtype), free, used)
    return kv, workspace


def _lower(
    lowering: Lowering, nodes: Sequence[Node], plan: ArenaPlan, logits: Value
) -> RecordedStep:
    arena = allocate(plan.num_bytes)
    ops = lower_all(lowering, nodes, plan.offsets, arena.ctypes.data)
    return RecordedStep(make_tape(ops), arena, plan.offsets[logits])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
