"""Loads an engine core for a configuration."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from vllmx_core.backend import HasMemory, LoadedInfo, LoadedModel, LoadOptions
from vllmx_core.backend_kit.dtypes import short_dtype
from vllmx_core.cache_groups import cache_layout, longest_sequence
from vllmx_core.checkpoint import (
    Checkpoint,
    check_quantization,
    open_checkpoint,
    quantise_in_situ,
    with_tower,
)
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError, ConfigError, UnsupportedOpError, shown
from vllmx_core.memory import format_bytes, free_bytes, free_memory, return_unused_bytes
from vllmx_core.model import Model, encoder_of, text_alone
from vllmx_core.model_choice import OWN, choose_model
from vllmx_core.records import Record
from vllmx_core.registry import architecture_names
from vllmx_core.sharding.model import sharded
from vllmx_core.specs import BackendSpec, ExecutorSpec
from vllmx_core.text_modules import with_text_modules

from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.generation_config import generation_config
from vllmx_engine.core.pooling import pooling_info, with_score_tokens
from vllmx_engine.core.sequence import Limits
from vllmx_engine.wire.messages import CoreInfo
from vllmx_engine.wire.pooling import PoolingInfo

logger = logging.getLogger("vllmx.load")

DEFAULT_BATCHED_TOKENS = 2048
AUTOMATIC_CONTEXT = 1 << 20
"""A longer context must be asked for: its tables alone take hundreds of megabytes."""
TENSOR_PARALLEL = "tensor-parallel"
"""The name of the executor that runs a model on several ranks."""
TABLE_SHARE = 8
"""One part in so many of the free memory may go to tables that grow with the context."""


def load_core(found: FoundModel) -> tuple[EngineCore, CoreInfo]:
    """Loads the model and puts an engine core around it.

    Raises:
        ModelNotFoundError, UnsupportedModelError, WeightFormatError: the model cannot be read.
        BackendUnavailableError: the wanted backend cannot run here.
        CapacityError: it does not fit into memory.
        ConfigError: a value of the configuration that this model does not allow.
    """
    started = time.monotonic()
    opened = open_model(found)
    checkpoint, options = opened.checkpoint, opened.options
    try:
        opened, loaded = _loaded(found, opened)
    finally:
        checkpoint.weights.close()
        return_unused_bytes()
    model = opened.model
    try:
        max_model_len = fitting_length(found.config, options, loaded.info)
        core = EngineCore(
            loaded,
            found.config,
            max_model_len=max_model_len,
            vocab_size=model.shape.vocab_size,
            shape=model.shape,
            encoder=encoder_of(model),
        )
        seconds = time.monotonic() - started
        pooling = pooling_info(checkpoint, model.shape)
        info = _core_info(found, opened, loaded, core.limits, seconds, pooling)
        if encoder_of(model) is not None:
            processor = dict(checkpoint.image_processor)
            info = msgspec.structs.replace(info, takes_images=True, image_processor=processor)
        _log(info)
    except BaseException:
        loaded.close()
        raise
    return core, info


class OpenedModel(Record):
    """A model that is ready to be loaded; `checkpoint.weights` is closed by who loads it."""

    checkpoint: Checkpoint
    model: Model
    backend: BackendSpec
    options: LoadOptions
    free_bytes: int
    """See `CoreInfo.free_bytes`."""


def open_model(found: FoundModel) -> OpenedModel:
    """Opens the checkpoint and decides who runs it, how. Raises as `load_core` does."""
    checkpoint = open_checkpoint(found.registry, found.path, found.config.load_format)
    try:
        check_quantization(checkpoint, found.config.quantization)
        if found.config.limit_images > 0:
            checkpoint = with_tower(
                found.registry, checkpoint, found.mmproj, found.config.load_format
            )
        checkpoint = with_text_modules(found.registry, checkpoint, found.config.task)
        checkpoint = with_score_tokens(checkpoint, found.config.task)
        chosen = choose_model(
            found.registry,
            checkpoint,
            found.config.model_impl,
            found.config.backend,
            found.config.task,
        )
        model = chosen.model
        if found.config.isq is not None:
            if chosen.impl != OWN:
                raise ConfigError(
                    f"--isq quantises for vllmx's own models, {chosen.impl} runs this one: leave it"
                    " out",
                    param="isq",
                )
            checkpoint = quantise_in_situ(found.registry, checkpoint, model, found.config.isq)
        _check_ranks(found.config, chosen.impl)
        spec, reason = found.registry.choose_backend(chosen.backend)
        logger.info("backend=%s reason=%r", spec.name, reason)
        if found.config.deterministic and not spec.fixed_sums:
            raise ConfigError(
                f"--deterministic: the order of sums of backend {spec.name!r} depends on shapes:"
                " choose --backend cpu, or leave it out",
                param="deterministic",
            )
        # several ranks have no passes of towers
        if found.config.limit_images == 0 or found.config.num_ranks > 1:
            model = text_alone(model) or model
        limit = checkpoint.config.get("text_limit")
        options = load_options(found.config, model, text_limit=limit, progress=found.progress)
        free = _free_bytes(found.config, spec)
        if found.config.memory_bytes is not None:
            most = found.config.memory_bytes / max(1, free)
            options = replace(options, memory_fraction=min(options.memory_fraction, most))
    except BaseException:
        checkpoint.weights.close()
        raise
    return OpenedModel(checkpoint, model, spec, options, free)


def _free_bytes(config: EngineConfig, spec: BackendSpec) -> int:
    """Memory that the model could take; 0: each rank has a device of its own. Raises ConfigError
    for a limit on that."""
    backend = spec.load()()
    if config.tensor_parallel_size == 1 or not isinstance(backend, HasMemory):
        return free_memory(backend)
    if config.memory_bytes is not None:
        raise ConfigError(
            f"--memory-bytes is of one device, and on {spec.name} each rank has its own: say"
            " --memory-fraction instead",
            param="memory_bytes",
        )
    return 0


def _check_ranks(config: EngineConfig, impl: str) -> None:
    """Raises ConfigError for ranks that cannot be."""
    if config.rank_hosts and config.num_ranks == 1:
        raise ConfigError(
            "--rank-hosts needs ranks for them: set --tensor-parallel-size or"
            " --pipeline-parallel-size to the number of hosts, this one counted, or a multiple",
            param="tensor_parallel_size",
        )
    if config.tensor_parallel_size > 1 and config.pipeline_parallel_size > 1:
        raise ConfigError(
            "--tensor-parallel-size and --pipeline-parallel-size do not go together: set one of"
            f" them to {config.num_ranks} and leave the other out",
            param="pipeline_parallel_size",
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, name) > 1 and impl != OWN:
            raise ConfigError(
                f"--{name.replace('_', '-')} divides vllmx's own models, {impl} runs this one:"
                " leave it out",
                param=name,
            )


def load_model(found: FoundModel, opened: OpenedModel) -> LoadedModel:
    """Loads a model by its backend, or by an executor on several ranks; raises what these do."""
    model, weights = opened.model, opened.checkpoint.weights
    if found.config.num_ranks == 1:
        if found.config.deterministic:
            length, whole_experts = opened.options.max_model_len, found.config.expert_parallel
            model = sharded(
                model, weights, length, 0, 1, deterministic=True, whole_experts=whole_experts
            )
        loaded: LoadedModel = opened.backend.load()().load(model, weights, opened.options)
        return loaded
    executor = found.registry.find(ExecutorSpec, TENSOR_PARALLEL)
    if executor is None:
        raise ConfigError(
            f"{found.config.num_ranks} ranks need vllmx-tp: pip install 'vllmx[tp]'",
            param="tensor_parallel_size",
        )
    run: Callable[[FoundModel, OpenedModel], LoadedModel] = executor.load()
    return run(found, opened)


def _loaded(found: FoundModel, opened: OpenedModel) -> tuple[OpenedModel, LoadedModel]:
    """The model, or its text alone where the backend lacks what images need."""
    try:
        return opened, load_model(found, opened)
    except UnsupportedOpError as error:
        alone = text_alone(opened.model)
        if alone is None:
            raise
        opened = replace(opened, model=alone)
        loaded = load_model(found, opened)
        logger.warning("text alone is served, images are refused: %s", error.message)
        return opened, loaded


def load_options(
    config: EngineConfig, model: Model, *, text_limit: int | None = None, progress: bool
) -> LoadOptions:
    """The backend's part of a configuration, with what the model decides filled in: a model of
    texts reads `text_limit` tokens of each unless more are asked for.

    Raises ConfigError for a max_model_len beyond what the model was made for, or beyond what an
    explicit number of KV blocks holds, and CapacityError where its tables do not fit into memory.
    """
    longest = model.shape.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {longest} tokens that the"
            f" model was made for: lower it to {longest} or leave it out",
            param="max_model_len",
        )
    max_model_len = config.max_model_len or min(longest, text_limit or longest, AUTOMATIC_CONTEXT)
    max_model_len = _with_tables_that_fit(config, model, max_model_len)
    step_tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    if model.shape.whole_prompts:
        step_tokens = max(step_tokens, max_model_len)
    if config.num_kv_blocks is not None:
        held = longest_sequence(
            cache_layout(model.shape, grouped=not model.shape.whole_prompts).windows,
            config.num_kv_blocks,
            config.block_size,
            step_tokens,
            max_model_len,
        )
        if config.max_model_len is None:
            max_model_len = min(max_model_len, held)
        elif held < max_model_len:
            raise ConfigError(
                f"--num-kv-blocks {config.num_kv_blocks} of {config.block_size} tokens hold {held}"
                f" tokens, fewer than --max-model-len {max_model_len}: lower --max-model-len to"
                f" {held} or raise --num-kv-blocks",
                param="num_kv_blocks",
            )
    return LoadOptions(
        dtype=short_dtype(config.dtype),
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=max_model_len,
        shrink_to_fit=config.max_model_len is None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_tokens,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_state_slots=config.num_state_slots,
        # A whole prompt needs all of its blocks at once; groups with a window come by in pieces.
        group_caches=not model.shape.whole_prompts,
        memory_fraction=config.memory_fraction,
        num_threads=config.num_threads,
        encoder_cache_bytes=config.encoder_cache_memory,
        enforce_eager=config.enforce_eager,
        progress=progress,
    )


def _with_tables_that_fit(config: EngineConfig, model: Model, max_model_len: int) -> int:
    """The length, or less where nobody asked for it: whatever a config claims, rotary tables must
    leave room. They are made before the KV cache, which needs much more, says how much fits."""
    position_bytes = sum(table.nbytes for table in model.constants(1).values())
    free = free_bytes()
    fitting = max(1, free // TABLE_SHARE // max(1, position_bytes))
    if config.max_model_len is None:
        max_model_len = min(max_model_len, fitting)
        if max_model_len < model.shape.max_model_len:
            logger.warning(
                "max_model_len reduced from the model's %d to %d: use --max-model-len for more",
                model.shape.max_model_len,
                max_model_len,
            )
    elif max_model_len > fitting:
        raise CapacityError(
            f"the position tables of --max-model-len {max_model_len} take"
            f" {format_bytes(max_model_len * position_bytes)}, of {format_bytes(free)} of free"
            f" memory they may take one part in {TABLE_SHARE}: lower it to {fitting}",
            param="max_model_len",
        )
    return max_model_len


def fitting_length(config: EngineConfig, options: LoadOptions, info: LoadedInfo) -> int:
    """The context length that the KV cache holds; one log line where it is less than the model's
    own and the user asked for none."""
    held = longest_sequence(
        info.cache_windows,
        info.num_kv_blocks,
        info.block_size,
        info.max_num_batched_tokens,
        options.max_model_len,
    )
    if held < options.max_model_len:
        logger.warning(
            "max_model_len reduced from %d to %d: the KV cache has %d blocks of %d tokens in %s;"
            " raise --memory-fraction (now %.2f) or --num-kv-blocks for longer contexts",
            options.max_model_len,
            held,
            info.num_kv_blocks,
            info.block_size,
            gibibytes(info.kv_cache_bytes),
            config.memory_fraction,
        )
    return held


def _core_info(
    found: FoundModel,
    opened: OpenedModel,
    loaded: LoadedModel,
    limits: Limits,
    seconds: float,
    pooling: PoolingInfo | None,
) -> CoreInfo:
    info, checkpoint = loaded.info, opened.checkpoint
    names = [*architecture_names(checkpoint.config), str(checkpoint.config.get("model_type", ""))]
    return CoreInfo(
        max_logprobs=found.config.max_logprobs,
        free_bytes=opened.free_bytes,
        model=found.config.name,
        path=str(found.path),
        architecture=names[0].encode("utf-8", "backslashreplace").decode(),
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        num_state_slots=info.num_state_slots,
        state_slot_bytes=info.state_slot_bytes,
        max_num_seqs=limits.max_rows,
        max_num_batched_tokens=limits.token_budget,
        weight_bytes=info.weight_bytes,
        kv_cache_bytes=info.kv_cache_bytes,
        load_seconds=seconds,
        pooling=pooling,
        generation_config=_sendable(generation_config(found.config, checkpoint.generation_config)),
        details={key: str(value) for key, value in info.details.items()}
        | ({} if found.config.isq is None else {"quantised in situ": found.config.isq}),
    )


def _sendable(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of it goes through a socket: JSON has integers and strings that messages do not."""
    found = {}
    for key, value in config.items():
        try:
            msgspec.msgpack.encode((key, value))
        except (TypeError, ValueError, OverflowError, RecursionError):
            logger.warning(
                "generation_config.json: %s = %s is passed over", shown(key), shown(value)
            )
        else:
            found[key] = value
    return found


def _log(info: CoreInfo) -> None:
    logger.info(
        "model=%s architecture=%s backend=%s device=%r dtype=%s load_s=%.2f weights=%s kv_cache=%s"
        " kv_tokens=%d kv_dtype=%s state_slots=%d max_model_len=%d max_num_seqs=%d peak_rss=%s"
        " isq=%s",
        info.model,
        info.architecture,
        info.backend,
        info.device,
        info.dtype,
        info.load_seconds,
        gibibytes(info.weight_bytes),
        gibibytes(info.kv_cache_bytes),
        info.num_kv_blocks * info.block_size,
        info.kv_cache_dtype,
        info.num_state_slots,
        info.max_model_len,
        info.max_num_seqs,
        gibibytes(_peak_memory_bytes()),
        info.details.get("quantised in situ", "none"),
    )


def gibibytes(size_bytes: int) -> str:
    """Writes a size for people: "1.50GiB", or MiB below a tenth of that."""
    if size_bytes < 1 << 27:
        return f"{size_bytes / (1 << 20):.1f}MiB"
    return f"{size_bytes / (1 << 30):.2f}GiB"


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
