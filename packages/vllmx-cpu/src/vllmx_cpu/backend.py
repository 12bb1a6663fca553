"""The backend "cpu": numpy buffers, native kernels, one recorded tape a model."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllmx_core.backend import HOST_STEP_TIMEOUT_S, LoadedInfo, LoadOptions
from vllmx_core.backend_kit.hidden import hidden_of, shared_matrices
from vllmx_core.backend_kit.limits import feature_rows, feature_shapes
from vllmx_core.dtypes import choose_dtype
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.ops.op import Op
from vllmx_core.system.memory import format_bytes, free_bytes
from vllmx_core.system.processors import available_processors
from vllmx_core.weights.part import WeightSource

from vllmx_cpu import native
from vllmx_cpu.images import VxImages, allocate_features, allocate_turned
from vllmx_cpu.kv_cache import allocate_pages, allocate_states
from vllmx_cpu.loaded import CpuLoadedModel, RecordedStep
from vllmx_cpu.lowering.ranks import ranks_of
from vllmx_cpu.lowering.site import Lowering
from vllmx_cpu.lowering.table import OPS, lower_all
from vllmx_cpu.memory import allocate
from vllmx_cpu.packing import LoadedWeights, load_weights
from vllmx_cpu.planning import LoadSizes, load_sizes
from vllmx_cpu.structs import VX_DTYPES
from vllmx_cpu.tape import make_tape
from vllmx_cpu.tower import CpuTower

logger = logging.getLogger("vllmx.cpu")

NAME = "cpu"
MAX_THREADS = 256


class CpuBackend:
    """`vllmx_core.backend.Backend` for x86-64 and 64-bit ARM."""

    @property
    def name(self) -> str:
        return NAME

    def supports(self, op: Op) -> bool:
        return OPS.supports(op)

    def environment(self) -> dict[str, str]:
        """Processor, instruction sets, compiler, threads, memory."""
        isas = native.instruction_sets()
        return {
            "processor": _processor(),
            "instruction set": native.choose_isa().name,
            "instruction sets": ", ".join(isa.name for isa in isas if isa.supported),
            "compiled by": native.library().vx_compiler().decode(),
            "threads": str(available_processors()),
            "free memory": format_bytes(free_bytes()),
        }

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> CpuLoadedModel:
        isa = native.choose_isa()
        dtype = choose_dtype(options.dtype, model.shape.dtype, VX_DTYPES, "CPU")
        threads = _num_threads(options)
        sizes = load_sizes(model, source, options, dtype, threads)
        weights = load_weights(
            sizes.specs,
            sizes.constants,
            source,
            sizes.shapes,
            shared=shared_matrices(options.hidden),
            num_threads=threads,
            progress=options.progress,
        )
        lowering = Lowering(
            isa,
            weights,
            sizes.segments,
            options.pages or allocate_pages(sizes.kv),
            allocate_states(model.shape.states, sizes.kv.states),
            sizes.kv.block_size,
            sizes.kv.dtype,
            allocate(sizes.room.panel_bytes),
            allocate(sizes.room.workspace_bytes),
            VxImages(),
            allocate_turned(sizes.fused.ops, sizes.max_rows["T"]),
            allocate_features(feature_shapes(model.shape, options))
            if options.hidden is None
            else options.hidden.parts,
            adapters=sizes.adapters,
            ranks=ranks_of(options.communicator),
        )
        recorded = None if options.enforce_eager else _lower(lowering, sizes)
        info = _info(sizes, weights, dtype, {"instruction set": isa.name, "threads": threads})
        info = replace(
            info, num_feature_rows=feature_rows(model.shape, options), encodes_in_parts=True
        )
        logger.info("loaded on %s with %s, %d threads", info.device, isa.name, threads)
        vocab_size = model.shape.vocab_size
        sampler_bytes = native.library().vx_sampler_workspace_bytes(vocab_size, threads)
        workspace = allocate(sampler_bytes)
        tower = None if sizes.tower is None else CpuTower(lowering, sizes.tower)
        team = native.Team(threads)  # last: from here on there are threads to be ended
        return CpuLoadedModel(
            info,
            team,
            lowering,
            vocab_size,
            workspace,
            recorded,
            sizes.recorded,
            tower,
            hidden_of(model.shape, lowering.features, weights.tied, lowering.pages),
        )


def _lower(lowering: Lowering, sizes: LoadSizes) -> RecordedStep:
    offsets = sizes.room.arena.offsets
    arena = allocate(sizes.room.arena.num_bytes)
    calls = lower_all(lowering, sizes.fused.ops, offsets, arena.ctypes.data)
    return RecordedStep(make_tape(calls), arena, offsets[sizes.fused.logits])


def _info(
    sizes: LoadSizes,
    weights: LoadedWeights,
    dtype: str,
    details: dict[str, Any],
) -> LoadedInfo:
    return LoadedInfo(
        backend=NAME,
        device=_processor(),
        dtype=dtype,
        kv_cache_dtype=sizes.kv.dtype,
        block_size=sizes.kv.block_size,
        num_kv_blocks=sizes.kv.num_blocks,
        max_num_seqs=sizes.kv.states.num_seqs,
        max_num_batched_tokens=sizes.max_rows["T"],
        max_logit_rows=sizes.max_rows["L"],
        weight_bytes=weights.num_bytes,
        kv_cache_bytes=sizes.kv.num_bytes,
        details=details
        | {"ops": len(sizes.fused.ops), "activation buffers": format_bytes(sizes.room.num_bytes)},
        step_timeout_s=HOST_STEP_TIMEOUT_S,
        cache_windows=sizes.kv.layout.windows,
        num_state_slots=sizes.kv.states.num_slots,
        state_slot_bytes=sizes.kv.states.slot_bytes,
        keeps_states_after=True,
    )


def _num_threads(options: LoadOptions) -> int:
    if options.num_threads is None:
        return min(available_processors(), MAX_THREADS)
    if not 1 <= options.num_threads <= MAX_THREADS:
        raise ConfigError(
            f"num_threads must be between 1 and {MAX_THREADS}, got {options.num_threads}",
            param="num_threads",
        )
    return options.num_threads


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
