"""Loads the model that drafts tokens for another one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from vllmx_core.backend import HasPages, LoadedModel, LoadOptions
from vllmx_core.errors import CapacityError, ConfigError, VllmxError
from vllmx_core.plugins.checkpoint import (
    Checkpoint,
    open_checkpoint,
    quantise_in_situ,
    resolve_path,
)
from vllmx_core.plugins.model_choice import OWN, choose_model
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.records import Record

from vllmx_engine.core.found_model import FoundModel

logger = logging.getLogger("vllmx.load")

_TWIN_TYPE = "q4_k"
"""The type of a twin's matrices: close enough to draw most tokens alike, and the fewest bytes."""


class LoadedDrafter(Record):
    """A model that drafts; see `vllmx_engine.core.draft_model.DraftModel`."""

    model: LoadedModel
    max_model_len: int
    """The longest sequence for which it drafts; it has no tables for later positions."""
    shares_pages: bool


def load_drafter(
    found: FoundModel, spec: BackendSpec, target: LoadedModel, vocab_size: int
) -> LoadedDrafter:
    """Loads the draft model that `EngineConfig.speculate` names, on the target's backend.

    Raises:
        ConfigError: it has another vocabulary, or the target cannot verify drafts of a model.
        CapacityError: it does not fit into the memory that the target leaves.
        VllmxError: it cannot be read; the message names --speculate.
    """
    config = found.config
    kind, _, rest = config.speculate.partition(":")
    _check_target(found, target)
    try:
        path = resolve_path(found.registry, rest) if kind == "model" else found.path
        checkpoint = open_checkpoint(found.registry, path, config.load_format)
    except VllmxError as error:
        raise _named(error) from error
    try:
        if kind == "layers":
            checkpoint = replace(checkpoint, config=_first_layers(checkpoint.config, int(rest)))
        return _load(found, spec, target, vocab_size, checkpoint, kind)
    except VllmxError as error:
        raise _named(error) from error
    finally:
        checkpoint.weights.close()


def _load(
    found: FoundModel,
    spec: BackendSpec,
    target: LoadedModel,
    vocab_size: int,
    checkpoint: Checkpoint,
    kind: str,
) -> LoadedDrafter:
    chosen = choose_model(found.registry, checkpoint, OWN, spec.name, "generate")
    model = chosen.model
    if model.shape.vocab_size != vocab_size:
        raise ConfigError(
            f"its vocabulary has {model.shape.vocab_size} tokens, that of the model {vocab_size}:"
            " choose a draft model of the same family",
            param="speculate",
        )
    if model.shape.states:
        raise ConfigError(
            "it keeps recurrent states, and only models without draft yet: choose ngram, suffix or"
            " off",
            param="speculate",
        )
    if kind == "twin":
        try:
            checkpoint = quantise_in_situ(found.registry, checkpoint, model, _TWIN_TYPE)
        except ConfigError as error:
            raise ConfigError(
                "a twin is made of weights with 16 or 32 bits, which the model's are not: choose"
                " ngram, suffix or model:PATH",
                param="speculate",
            ) from error
    info = target.info
    is_part = kind == "twin" or (kind == "layers" and len(info.cache_windows) == 1)
    shares = is_part and isinstance(target, HasPages)
    options = LoadOptions(
        dtype=found.config.dtype,
        kv_cache_dtype=info.kv_cache_dtype if shares else "auto",
        max_model_len=min(model.shape.max_model_len, info.num_kv_blocks * info.block_size),
        shrink_to_fit=True,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        group_caches=shares,
        pages=target.pages if shares and isinstance(target, HasPages) else None,
        num_threads=found.config.num_threads,
        enforce_eager=found.config.enforce_eager,
        progress=found.progress,
    )
    loaded: LoadedModel = spec.load()().load(model, checkpoint.weights, options)
    logger.info("drafting by %s, %.0f MB", found.config.speculate, loaded.info.weight_bytes / 1e6)
    return LoadedDrafter(loaded, options.max_model_len, shares)


def _first_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The configuration of a model's first layers. Raises ConfigError."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return {**config, "text_config": _first_layers(inner, count)}
    known = config.get("num_hidden_layers")
    if not isinstance(known, int) or not 0 < count < known:
        raise ConfigError(
            f"the model has {known} layers, so layers:N takes from 1 to {(known or 1) - 1}, got"
            f" {count}",
            param="speculate",
        )
    lists = {
        key: value[:count]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == known
    }
    return {**config, **lists, "num_hidden_layers": count}


def _check_target(found: FoundModel, target: LoadedModel) -> None:
    reason = ""
    if found.config.num_ranks > 1:
        reason = "a model on several ranks has no draft model yet"
    elif target.info.num_state_slots and not target.info.keeps_states_after:
        reason = "the model keeps recurrent states, behind which its backend verifies no drafts yet"
    elif None not in target.info.cache_windows:
        reason = "all layers of the model have a window, so a draft model would lack old tokens"
    if reason:
        raise ConfigError(
            f"--speculate {found.config.speculate}: {reason}; choose ngram, suffix or off",
            param="speculate",
        )


def _named(error: VllmxError) -> VllmxError:
    """The error with the flag that it is about."""
    text = f"--speculate: the draft model cannot be loaded: {error.message}"
    if isinstance(error, CapacityError):  # it comes after the model, which takes what it may
        text += "; or lower --memory-fraction, so that the model leaves room for it"
        return CapacityError(text, param="speculate")
    return ConfigError(text, param="speculate")
