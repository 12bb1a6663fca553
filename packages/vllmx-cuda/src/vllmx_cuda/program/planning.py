"""Plans the memory of a model before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllmx_core.backend import LoadOptions
from vllmx_core.backend_kit.hidden import shared_matrices
from vllmx_core.backend_kit.limits import (
    check_weights_fit,
    feature_bytes,
    feature_shapes,
    step_limits,
)
from vllmx_core.cache.capacity import CachePlan, layout_of
from vllmx_core.model import Model
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.op import OpList
from vllmx_core.ops.values import Rows
from vllmx_core.plan import AnyArray
from vllmx_core.recorded.recording import prepare
from vllmx_core.system.memory import format_bytes
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import WeightSpec

from vllmx_cuda.device.arch import number
from vllmx_cuda.device.buckets import bucket_sizes, mixed_sizes
from vllmx_cuda.device.device import Device
from vllmx_cuda.kernel_specs.attention import KV_ELEM
from vllmx_cuda.matrices.form import Target
from vllmx_cuda.matrices.plan import WeightPlan, plan_weights
from vllmx_cuda.program.expert_ops import expert_stacks
from vllmx_cuda.program.fused_ops import join_products
from vllmx_cuda.program.kv_cache import CODES, plan_kv
from vllmx_cuda.program.layout import StepLayout, lay_out, max_items, work_kinds
from vllmx_cuda.program.lower import OPS
from vllmx_cuda.program.one_shot import join_norms
from vllmx_cuda.program.rank_ops import ties_of
from vllmx_cuda.program.sampler import sampler_bytes
from vllmx_cuda.program.staging import Layout
from vllmx_cuda.program.step_arrays import StepSizes
from vllmx_cuda.program.tower import TowerSizes, tower_sizes
from vllmx_cuda.program.work import WorkKinds

logger = logging.getLogger("vllmx.cuda")

ROW_MULTIPLE = 4
"""Some products want whole fours of rows; the rest is padding."""
LOGIT_COUNTS = 2
"""Numbers of logit rows that a step with prompts or drafts is captured for."""
GRAPH_BYTES = 2 << 20
"""Kept free for each captured graph."""


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """The recorded step, and the sizes of everything that it needs."""

    steps: OpList
    specs: Sequence[WeightSpec]
    constants: Mapping[str, AnyArray]
    dtype: str
    weights: WeightPlan
    max_rows: Mapping[Rows, int]
    max_blocks: int
    """Blocks of one sequence."""
    buckets: tuple[int, ...]
    """Batch sizes of decode steps that are captured, or padded to when capture is off: of models
    that sample, and of all their stages, for each is padded as the others are."""
    mixed_buckets: tuple[int, ...]
    """Tokens of steps with prompts or drafts, captured when they are first used; none of stages."""
    work: WorkKinds
    layout: StepLayout
    staging_bytes: int
    kv: CachePlan
    tower: TowerSizes | None = None
    """Set where the model sees images."""
    features: tuple[tuple[int, int], ...] = ()
    """(rows, width) of each part of the store of features."""


def load_sizes(
    model: Model,
    source: WeightSource,
    options: LoadOptions,
    dtype: str,
    kv_dtype: str,
    device: Device,
    *,
    wgmma: bool = False,
    fused: bool = True,
) -> LoadSizes:
    """Raises CapacityError when weights or one sequence of max_model_len do not fit into the memory
    of the device that is free, and WeightFormatError when `source` has not what the model asks
    for."""
    recording = prepare(
        model,
        options.max_model_len,
        "cuda",
        OPS.supports,
        adapts=options.adapters is not None,
    )
    steps, specs, constants = recording.steps, recording.specs, recording.constants
    steps = join_norms(steps)
    if fused:
        steps = join_products(steps)
    free, processors = device.free_bytes(), device.info.num_processors
    max_rows = step_limits(options, model.shape.limited_row, multiple=ROW_MULTIPLE)
    tokens = max_rows["T"]
    table_values = sum(table.size for table in constants.values())
    target = Target(dtype, number(device.info.arch))
    stacks = expert_stacks(steps.ops)
    mixed = {op.w.name for op in recording.all_ops if isinstance(op, Mix)}
    weights = plan_weights(specs, table_values, source, target, tokens, stacks, mixed)
    weights = replace(weights, shared=frozenset(shared_matrices(options.hidden)))
    _check_weights(weights.num_bytes, free, dtype, device)
    ties = ties_of(steps.ops, dtype)
    buckets = bucket_sizes(options.num_seqs) if steps.samples or ties.sends else ()
    captures = not options.enforce_eager and steps.samples and not ties.receives
    several = mixed_sizes(tokens) if captures else ()
    kv_kind = CODES.get(kv_dtype, KV_ELEM)
    work = work_kinds(steps.ops, dtype, kv_kind, device.info.arch, wgmma=wgmma)
    layout = lay_out(steps, max_rows, dtype, processors, weights.scratch)
    items, tiles = max_items(steps.ops, tokens, processors), (tokens,) * len(work.tiles)
    groups = len(layout_of(model.shape, options).groups)
    has_states = bool(model.shape.states)
    largest = StepSizes(tokens, max_rows["L"], tokens, items, tiles, groups, has_states)
    staging_bytes = Layout.of(largest, work).num_bytes
    max_blocks = -(-options.max_model_len // max(1, options.block_size))
    graphs = (
        0 if options.enforce_eager else GRAPH_BYTES * (len(buckets) + LOGIT_COUNTS * len(several))
    )
    used = weights.num_bytes + layout.num_bytes + staging_bytes + graphs
    used += 4 * groups * max_rows["T"] * max_blocks + 4 * max_rows["L"]
    if steps.samples:
        used += sampler_bytes(model.shape.vocab_size, max_rows["L"])
    tower = tower_sizes(model, recording, weights, device, dtype, options, wgmma=wgmma)
    if tower is not None:
        used += tower.num_bytes
    used += feature_bytes(model.shape, options)
    kv = plan_kv(model.shape, options, kv_dtype, free, used)
    _log_memory(device, free, options.memory_fraction, weights.num_bytes, used, kv.num_bytes)
    return LoadSizes(
        steps,
        specs,
        constants,
        dtype,
        weights,
        max_rows,
        max_blocks,
        buckets,
        several,
        work,
        layout,
        staging_bytes,
        kv,
        tower,
        tuple(feature_shapes(model.shape, options)),
    )


def _log_memory(
    device: Device, free: int, share: float, weights: int, used: int, cache: int
) -> None:
    logger.info(
        "memory of %s: %s of %s are free; --memory-fraction %.2f of it is for weights (%s), buffers"
        " (%s) and KV cache (%s)",
        device.info.name,
        format_bytes(free),
        format_bytes(device.info.memory_bytes),
        share,
        format_bytes(weights),
        format_bytes(used - weights),
        format_bytes(cache),
    )


def _check_weights(size: int, free: int, dtype: str, device: Device) -> None:
    check_weights_fit(
        size,
        free,
        dtype,
        where=f" on {device.info.name} of {format_bytes(device.info.memory_bytes)}",
        remedy="choose a smaller model, a 16-bit --dtype, or end what else runs on the GPU",
    )
