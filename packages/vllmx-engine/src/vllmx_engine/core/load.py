"""Loads an engine core for a configuration."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
from vllmx_core.backend import LoadedModel, LoadOptions, free_memory
from vllmx_core.backend_kit.token_by_token import TokenByToken
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, UnsupportedOpError, VllmxError, listing
from vllmx_core.model import Model, Tapped, TapSpec, encoder_of, heads_of, text_alone
from vllmx_core.plugins.checkpoint import (
    Checkpoint,
    check_quantization,
    open_checkpoint,
    quantise_in_situ,
    with_tower,
)
from vllmx_core.plugins.model_choice import OWN, choose_model
from vllmx_core.plugins.specs import BackendSpec, ExecutorSpec
from vllmx_core.records import Record
from vllmx_core.sharding.model import sharded
from vllmx_core.system.memory import return_unused_bytes
from vllmx_core.text_modules import with_text_modules
from vllmx_core.weights.map import unread_names
from vllmx_core.weights.part import WeightSource

from vllmx_engine.core.adapters import AdapterFiles, AdapterPool, StartAdapters
from vllmx_engine.core.core_info import core_info, log_info
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.load_options import fitting_length, load_options
from vllmx_engine.core.pooling import check_task, pooling_info, with_score_tokens
from vllmx_engine.images.kinds import find_video_processor
from vllmx_engine.wire.messages import CoreInfo

logger = logging.getLogger("vllmx.load")

_EXPECTED = re.compile(
    r"\.inv_freq$|position_ids$|^(model\.)?mtp[._]|\.(mtp|nextn|eh_proj|enorm|hnorm|shared_head)\."
    r"|(^|\.)(visual|vision|audio|image|video|multi_modal|mm_|embed_vision|embed_audio|connector)"
)
"""Buffers that are computed, layers of multi-token prediction, and towers that are not served."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MAX_ZERO_BYTES = 1 << 20
_SHOWN = 5


def log_unread(model: Model, checkpoint: Checkpoint, *, heads: bool = False) -> None:
    """Logs one warning for unexpected tensors, and one line for those of parts that are not served.
    Vectors of zeros are left out: some quantisers add such biases."""
    others = [encoder_of(model), heads_of(model) if heads else None]
    specs = [*model.weights(), *(one for other in others if other for one in other.weights())]
    source = checkpoint.weights
    unread = unread_names(specs, source)
    layers = _layers_behind(checkpoint)
    expected = {name for name in unread if _EXPECTED.search(name) or layers(name)}
    if model.shape.output != "tokens":
        expected |= {name for name in unread if name.rpartition(".")[0].endswith("lm_head")}
    strange = {name for name in unread - expected if not _is_zero(source, name)}
    if strange:
        logger.warning(
            "tensors of the checkpoint that the model does not read: %s", _kinds(strange)
        )
    if expected:
        logger.info("tensors that are passed over: %s", _kinds(expected))


def _layers_behind(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Returns a test for tensors of multi-token prediction layers, which follow the others."""
    config = checkpoint.config
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    count = config.get("num_hidden_layers")
    predicts = any(config.get(key) for key in _PREDICTION)

    def is_behind(name: str) -> bool:
        found = re.search(r"\.layers\.(\d+)\.", name)
        return predicts and found is not None and isinstance(count, int) and int(found[1]) >= count

    return is_behind


def _kinds(names: Iterable[str]) -> str:
    """Names with a star in place of the layer, and the count of each."""
    found = Counter(_NUMBER.sub("*", name) for name in sorted(names))
    return listing([name if n == 1 else f"{name} ({n})" for name, n in found.items()], _SHOWN)


def _is_zero(source: WeightSource, name: str) -> bool:
    try:
        part = source.part(name)
        if len(part.shape) != 1 or part.shape[0] * 4 > _MAX_ZERO_BYTES:
            return False
        return not part.dequantize().any()
    except VllmxError:  # such as an unsupported type
        return False


TENSOR_PARALLEL = "tensor-parallel"
"""The name of the executor that runs a model on several ranks."""


def load_core(found: FoundModel) -> tuple[EngineCore, CoreInfo]:
    """Loads the model and puts an engine core around it.

    Raises:
        ModelNotFoundError, UnsupportedModelError, WeightFormatError: the model cannot be read.
        BackendUnavailableError: the wanted backend cannot run here.
        CapacityError: it does not fit into memory.
        ConfigError: a value of the configuration that this model does not allow.
    """
    started = time.monotonic()
    connect = None
    if found.config.kv_connector is not None:
        from vllmx_engine.core.load_tiers import connector_of  # few starts need it

        connect = connector_of(found.config.kv_connector, found.registry)
    opened = open_model(found)
    try:
        if found.config.drafts_by_model or found.config.speculate == "auto":
            found, opened = _with_taps(found, opened)
        adapters = _adapters(found, opened)
        if adapters is not None:
            opened = replace(opened, options=replace(opened.options, adapters=adapters.room))
        checkpoint, options = opened.checkpoint, opened.options
        opened, loaded = _loaded(found, opened)
    finally:
        opened.checkpoint.weights.close()
        return_unused_bytes()
    model = opened.model
    if opened.lost_tower:
        logger.warning(
            "text alone is served, images are refused: --pipeline-parallel-size has no passes of"
            " towers, --tensor-parallel-size has"
        )
    drafter = None
    try:
        max_model_len = fitting_length(found.config, options, loaded.info)
        if found.config.drafts_by_model:
            # few starts need it
            from vllmx_engine.core.load_drafter import DraftTarget, load_drafter

            target = DraftTarget(loaded, model, checkpoint.config, max_model_len, opened.taps)
            drafter = load_drafter(found, opened.backend, target)
        known = ""
        # A replica of this host may find other files when it starts again; `vllmx core` has a mark.
        exchanges = found.config.role != "both" and not found.host_key
        if found.config.kv_disk is not None or connect is not None or exchanges:
            from vllmx_engine.core.fingerprint import fingerprint  # few starts need it

            known = fingerprint(found, loaded.info)
        core = EngineCore(
            loaded,
            found.config,
            max_model_len=max_model_len,
            vocab_size=model.shape.vocab_size,
            shape=model.shape,
            encoder=encoder_of(model),
            drafter=drafter,
            fingerprint=known,
            connect=connect,
            adapters=None if adapters is None else AdapterPool(loaded, adapters),
        )
        seconds = time.monotonic() - started
        pooling = pooling_info(checkpoint, model.shape)
        info = core_info(
            found, checkpoint, opened.free_bytes, loaded, core.limits, seconds, pooling
        )
        features = model.shape.features
        if features is not None and features.crossed:
            start = features.decoder_start
            rows = (
                {"audio_rows": features.crossed}
                if start is None
                else {
                    "encoder_tokens": features.crossed,
                    "decoder_start": start,
                }
            )
            info = msgspec.structs.replace(info, **rows)
        elif encoder_of(model) is not None:
            processor = dict(checkpoint.image_processor)
            hears = features is not None and features.is_audio
            sees_videos = not hears and not processor and find_video_processor(Path(info.path))
            info = msgspec.structs.replace(
                info,
                takes_images=not hears,
                takes_videos=bool(sees_videos),
                takes_audio=hears,
                image_room=core.image_room,
                image_processor=processor,
            )
        if adapters is not None:
            info = msgspec.structs.replace(info, adapters=core.adapters.infos)
        log_info(info)
    except BaseException:
        if drafter is not None:
            drafter.model.close()
        loaded.close()
        raise
    return core, info


class OpenedModel(Record):
    """A model that is ready to be loaded; `checkpoint.weights` is closed by the loader."""

    checkpoint: Checkpoint
    model: Model
    backend: BackendSpec
    options: LoadOptions
    free_bytes: int
    """See `CoreInfo.free_bytes`."""
    lost_tower: bool = False
    """True if the model sees images, and text alone was not asked for."""
    taps: TapSpec | None = None
    """The hidden states that it keeps for a drafter."""


def open_model(found: FoundModel, free_bytes: int | None = None) -> OpenedModel:
    """Opens the checkpoint and chooses backend and options. Raises as `load_core` does.

    Args:
        free_bytes: of the memory that a rank shares with others, found before one of them loaded.
    """
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
        if chosen.impl == OWN:
            heads = found.config.speculate in ("heads", "auto")
            log_unread(model, checkpoint, heads=heads)
        if found.config.isq is not None:
            if chosen.impl != OWN:
                raise ConfigError(
                    f"--isq quantises for vllmx's own models, {chosen.impl} runs this one: leave it"
                    " out",
                    param="isq",
                )
            checkpoint = quantise_in_situ(found.registry, checkpoint, model, found.config.isq)
        _check_ranks(found.config, chosen.impl)
        check_task(found.config.task, pooling_info(checkpoint, model.shape))
        spec, reason = found.registry.choose_backend(chosen.backend)
        logger.info("backend=%s reason=%r", spec.name, reason)
        in_stages = found.config.pipeline_parallel_size > 1  # which have no passes of towers
        lost_tower = in_stages and found.config.limit_images > 0 and encoder_of(model) is not None
        features = model.shape.features
        crosses = features is not None and features.crossed > 0
        if crosses and in_stages:
            raise ConfigError(
                "--pipeline-parallel-size has no passes of encoders, which read the input of this"
                " model: use --tensor-parallel-size",
                param="pipeline_parallel_size",
            )
        if (found.config.limit_images == 0 and not crosses) or in_stages:
            model = text_alone(model) or model
        limit = checkpoint.config.get("text_limit")
        options = load_options(found.config, model, text_limit=limit, progress=found.progress)
        if found.config.deterministic and not spec.fixed_sums:
            _check_token_by_token(found.config, spec, model)
            if not model.shape.whole_prompts and found.config.max_num_batched_tokens is None:
                budget = min(_TOKENS_ALONE, options.max_num_batched_tokens)
                options = replace(options, max_num_batched_tokens=budget)
        free = free_bytes or free_for_model(found.config, spec)
        if found.config.num_ranks > 1:
            options = replace(options, free_bytes=free or None)
        if found.config.memory_bytes is not None:
            most = found.config.memory_bytes / max(1, free)
            options = replace(options, memory_fraction=min(options.memory_fraction, most))
    except BaseException:
        checkpoint.weights.close()
        raise
    return OpenedModel(checkpoint, model, spec, options, free, lost_tower)


def _with_taps(found: FoundModel, opened: OpenedModel) -> tuple[FoundModel, OpenedModel]:
    """The model with the hidden states that its drafter reads. Heads take the place of `auto` where
    the checkpoint has them."""
    from vllmx_engine.core.load_drafter import hidden_states_for  # few starts need it

    taps, options = hidden_states_for(
        found, opened.model, opened.checkpoint, opened.options, opened.free_bytes
    )
    if taps is not None and found.config.speculate == "auto":
        found = replace(found, config=replace(found.config, speculate="heads"))
    return found, replace(opened, taps=taps, options=options)


def free_for_model(config: EngineConfig, spec: BackendSpec) -> int:
    """Memory that the model could take, in one process or in ranks that share it; 0: each rank has
    a device of its own. Raises ConfigError for a limit on that."""
    if config.num_ranks == 1 or not spec.has_own_devices():
        return int(free_memory(spec.load()()))
    if config.memory_bytes is not None:
        raise ConfigError(
            f"--memory-bytes is of one device, and on {spec.name} each rank has its own: say"
            " --memory-fraction instead",
            param="memory_bytes",
        )
    return 0


def _adapters(found: FoundModel, opened: OpenedModel) -> StartAdapters | None:
    """The adapters of the start; None: the model takes none. Raises ConfigError for ranks."""
    if not found.config.takes_adapters:
        return None
    if found.config.num_ranks > 1:
        raise ConfigError(
            "ranks take no LoRA adapters: leave --tensor-parallel-size and"
            " --pipeline-parallel-size out, or merge the adapter into the model",
            param="enable_lora",
        )
    files = AdapterFiles.of(found.registry, opened.checkpoint.config, opened.model)
    return files.at_start(found.config)


def _check_ranks(config: EngineConfig, impl: str) -> None:
    """Raises ConfigError for ranks that cannot be."""
    if config.rank_hosts and config.num_ranks == 1:
        raise ConfigError(
            "--rank-hosts needs ranks for them: set --tensor-parallel-size or"
            " --pipeline-parallel-size to the number of hosts, this one counted, or a multiple",
            param="tensor_parallel_size",
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, name) > 1 and impl != OWN:
            raise ConfigError(
                f"--{name.replace('_', '-')} divides vllmx's own models, {impl} runs this one:"
                " leave it out",
                param=name,
            )


_TOKENS_ALONE = 256
"""Tokens of a step that computes each alone: more would take as long, and delay aborts."""


def _check_token_by_token(config: EngineConfig, spec: BackendSpec, model: Model) -> None:
    """Raises ConfigError where single tokens do not give equal bits."""
    reason = ""
    if config.num_ranks > 1:
        reason = "sums over ranks depend on their number: choose --backend cpu, or one rank"
    elif model.shape.features is not None:
        reason = (
            "images, audio and inputs of encoders are computed together: choose --backend cpu, or"
            " --limit-images 0 for a model with text of its own"
        )
    if reason:
        raise ConfigError(
            f"--deterministic computes each token alone on backend {spec.name!r}, where {reason}",
            param="deterministic",
        )


def load_model(found: FoundModel, opened: OpenedModel) -> LoadedModel:
    """Loads a model by its backend, or by an executor on several ranks; raises what these do."""
    model, weights = opened.model, opened.checkpoint.weights
    if found.config.num_ranks == 1:
        if found.config.deterministic and opened.backend.fixed_sums:
            length, whole_experts = opened.options.max_model_len, found.config.expert_parallel
            model = sharded(
                model, weights, length, 0, 1, deterministic=True, whole_experts=whole_experts
            )
        if opened.taps is not None:
            model = Tapped(model, opened.taps)
        loaded: LoadedModel = opened.backend.load()().load(model, weights, opened.options)
        if found.config.deterministic and not opened.backend.fixed_sums:
            return TokenByToken(loaded, whole_rows=model.shape.whole_prompts)
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
        text = replace(found, config=replace(found.config, limit_images=0))  # for all ranks
        loaded = load_model(text, opened)
        logger.warning("text alone is served, images are refused: %s", error.message)
        return opened, loaded
