"""Chooses the cuts between stages: rank 0 measures each segment of a decode step on its backend and
sends the choice to the other ranks.

Each kind of segment is loaded once: layers of the same ops, sizes and formats take the same time.
The time of a step without layers is subtracted. A model has few kinds of layers, so this takes
about as long as reading some layers, and their memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from vllmx_core.backend import Backend, LoadedModel, LoadOptions
from vllmx_core.cache.capacity import layout_of
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, OpError, UnsupportedOpError
from vllmx_core.model import Model, ModelShape
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_core.recorded.recording import Recording, record
from vllmx_core.sharding.stage_costs import (
    STEP_ROWS,
    byte_costs,
    likeness,
    measured_cuts,
    segment_bounds,
    sums_of_stages,
)
from vllmx_core.sharding.stage_cuts import (
    Cut,
    check_stages,
    layers_between,
    num_layers,
    places,
)
from vllmx_core.sharding.stages import ProbedSegment
from vllmx_core.weights.part import WeightSource
from vllmx_engine.core.load import OpenedModel

from vllmx_tp.loading import BY_BYTES, Cores, on_cores, part_of_rank, rank_options

logger = logging.getLogger("vllmx.tp")

_CONTEXT = 256
"""Tokens of each row, or fewer if the model's limit is lower."""
_WARM_STEPS = 2
_STEPS = 12
_MOST_S = 2.0
"""The seconds after which no further steps are run."""


def with_layers(
    opened: OpenedModel, config: EngineConfig, cores: Cores, share: int
) -> EngineConfig:
    """The configuration with the measured layers of each stage; unchanged without stages, or if it
    has layers already."""
    stages = config.pipeline_parallel_size
    if stages == 1 or config.pipeline_layers is not None:
        return config
    options, part = opened.options, 1 / config.num_ranks
    own = opened.backend.has_own_devices()
    mine = rank_options(options, part, len(cores), share, own_devices=own)
    try:
        with on_cores(cores):
            layers = _measured(opened, mine, config)
        return replace(config, pipeline_layers=",".join(map(str, layers)))
    except UnsupportedOpError:
        raise  # `vllmx_engine.core.load` catches it and serves the text alone
    except Exception as error:  # the model can be served without a measurement
        if isinstance(error, ConfigError) and error.param == "pipeline_parallel_size":
            raise  # too many stages, however they are cut
        logger.warning(
            "layers are cut by bytes of weights, as they could not be measured (%s: %s)",
            type(error).__name__,
            error,
        )
        return replace(config, pipeline_layers=BY_BYTES)


def _measured(opened: OpenedModel, options: LoadOptions, config: EngineConfig) -> tuple[int, ...]:
    """The layers of each stage."""
    began_s, stages = time.perf_counter(), config.pipeline_parallel_size
    model, source = opened.model, opened.checkpoint.weights
    options = small_options(options, model)
    recording = record(model, options.max_model_len)
    cuts = places(recording.steps, model.shape)
    check_stages(cuts, stages)
    cuts = _of_ranks(cuts, recording, opened, config)
    backend: Backend = opened.backend.load()()
    logger.info("parts of the model are loaded one by one, to see what each takes of a step")
    seconds = segment_seconds(backend, model, recording, cuts, source, options)
    chosen = measured_cuts(cuts, byte_costs(recording, source), seconds, stages)
    layers = layers_between(chosen, recording.steps.ops)
    logger.info(
        "stages have %s layers and take %s ms of a step of %d rows, measured in %.1f s",
        ",".join(map(str, layers)),
        ", ".join(f"{1e3 * one:.2f}" for one in sums_of_stages(chosen, cuts, seconds)),
        options.num_seqs,
        time.perf_counter() - began_s,
    )
    return layers


def _of_ranks(
    cuts: Sequence[Cut], recording: Recording, opened: OpenedModel, config: EngineConfig
) -> list[Cut]:
    """The places at whose layers the ranks' parts can be cut too. Raises OpError if they are too
    few."""
    part = part_of_rank(opened, config, 0)
    steps = record(part, opened.options.max_model_len).steps
    ends = {num_layers(steps.ops[: cut.index]) for cut in places(steps, part.shape)}
    found = [cut for cut in cuts if num_layers(recording.steps.ops[: cut.index]) in ends]
    if len(found) + 1 < config.pipeline_parallel_size:
        raise OpError("parts of ranks can be cut behind other layers than the model")
    return found


def small_options(options: LoadOptions, model: Model) -> LoadOptions:
    """Options to load a segment, with a short context."""
    rows = min(STEP_ROWS, options.num_seqs)
    length = min(_CONTEXT, options.max_model_len)
    groups = len(layout_of(model.shape, options).groups)
    return replace(
        options,
        max_model_len=length,
        shrink_to_fit=False,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, options.block_size),
        num_kv_blocks=rows * -(-length // options.block_size) * max(1, groups),
        kv_cache_memory_bytes=None,
        num_state_slots=2 * rows if model.shape.states else None,
        progress=False,
    )


def segment_seconds(
    backend: Backend,
    model: Model,
    recording: Recording,
    cuts: Sequence[Cut],
    source: WeightSource,
    options: LoadOptions,
) -> list[float]:
    """Seconds of each segment between the places `cuts`. Raises what loading raises."""
    specs = {spec.name: spec for spec in recording.specs}
    layout = layout_of(model.shape, options)
    kinds: dict[object, _Kind] = {}
    with ExitStack() as loaded:

        def kind_of(begin: Cut, end: Cut | None) -> _Kind:
            part = ProbedSegment(model, recording.steps, begin, end, layout)
            likes = likeness(part.ops, specs, source)
            if likes not in kinds:
                one = backend.load(part, source, options)
                loaded.callback(one.close)
                plan = _plan(one, model.shape, options.max_model_len, has_head=end is None)
                kinds[likes] = _Kind(one, plan)
            return kinds[likes]

        bare = kind_of(cuts[0], cuts[0])
        parts = [kind_of(begin, end) for begin, end in segment_bounds(cuts)]
        _run_in_turn([*kinds.values()])
    return [max(1e-9, one.best_s - bare.best_s) for one in parts]


class _Kind:
    """A loaded segment, measured for all that are alike."""

    def __init__(self, model: LoadedModel, plan: StepPlan) -> None:
        self._model, self._plan = model, plan
        self.best_s = float("inf")
        """Seconds of the fastest step: other processes only slow steps down."""

    def run(self, *, warm: bool) -> None:
        """Runs a step, and measures it unless it warms up."""
        rows = SamplingRows.greedy(self._plan.num_logit_rows)
        began_s = time.perf_counter()
        self._model.step(self._plan, rows).result()
        if not warm:
            self.best_s = min(self.best_s, time.perf_counter() - began_s)


def _run_in_turn(kinds: Sequence[_Kind]) -> None:
    """Runs steps of all kinds in turn, as layers in a step: so weights are not cached, and a slow
    moment of the machine affects all kinds."""
    for _ in range(_WARM_STEPS):
        for one in kinds:
            one.run(warm=True)
    began_s = time.perf_counter()
    for _ in range(_STEPS):
        for one in kinds:
            one.run(warm=False)
        if time.perf_counter() - began_s > _MOST_S:
            break


def _plan(loaded: LoadedModel, shape: ModelShape, length: int, *, has_head: bool) -> StepPlan:
    """A step in which each row feeds the last of `length` tokens; tokens of all rows differ, so
    that they go to different experts."""
    info = loaded.info
    rows, groups = info.max_num_seqs, len(info.cache_windows)
    each = info.num_kv_blocks // (rows * groups)
    blocks = np.arange(rows * groups * each, dtype=np.int32).reshape(groups, rows, each)
    position = min(each * info.block_size, length) - 1
    slots = blocks[:, :, position // info.block_size] * info.block_size
    one_each = np.arange(rows, dtype=np.int32)
    return StepPlan(
        tokens=(one_each * 9973 % shape.vocab_size).astype(np.int32),
        positions=np.full(rows, position, np.int32),
        slots=tuple(slots + position % info.block_size),
        query_start=np.arange(rows + 1, dtype=np.int32),
        context_len=np.full(rows, position + 1, np.int32),
        block_tables=tuple(blocks),
        logit_rows=one_each if has_head else one_each[:0],
        state_from=one_each if info.num_state_slots else None,
        state_to=one_each if info.num_state_slots else None,
    )
