"""Loads the model that drafts tokens for another one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllmx_core.backend import HasHidden, HasPages, LoadedModel, LoadOptions
from vllmx_core.backend_kit.hidden import Hidden
from vllmx_core.errors import CapacityError, ConfigError, VllmxError
from vllmx_core.model import DraftSpec, Model, TapSpec, heads_of
from vllmx_core.plugins.checkpoint import (
    Checkpoint,
    open_checkpoint,
    quantise_in_situ,
    resolve_path,
)
from vllmx_core.plugins.model_choice import OWN, choose_model
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.records import Record
from vllmx_core.weights.map import choices
from vllmx_core.weights.spec import PartSpec

from vllmx_engine.core.block_drafter import BlockDrafter
from vllmx_engine.core.draft_model import DraftModel
from vllmx_engine.core.drafter_files import (
    with_mask_embedding,
    with_target_config,
    with_target_weights,
)
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.hidden_drafter import KEPT_STEPS, HiddenDrafter
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.rows import RowTable
from vllmx_engine.text.gguf_tokenizer import GGUFVocabulary
from vllmx_engine.text.tokenizer import TOKENIZER_NAME, Tokenizer

_MOST_OTHER = 0.01
"""The share of ids that may stand for other tokens; fine-tuned models rename a few."""

logger = logging.getLogger("vllmx.load")

_TWIN_TYPE = "q4_k"
"""The type of a twin's matrices: close enough to draw most tokens alike, and the fewest bytes."""

_STEP_UNIT = 64
"""Backends may take larger steps than they were asked for: some pad rows."""


def hidden_states_for(
    found: FoundModel, target: Model, checkpoint: Checkpoint, options: LoadOptions, free_bytes: int
) -> tuple[TapSpec | None, LoadOptions]:
    """The hidden states of the target that its drafter will read, and options that leave memory for
    it; None: it reads none, or is not found (`auto`). Raises as `load_drafter` does.

    Args:
        free_bytes: of the memory for both.
    """
    config = found.config
    kind, _, rest = config.speculate.partition(":")
    try:
        if kind in ("heads", "auto"):
            drafter = _heads(found, target, checkpoint)
        elif kind == "model":
            path = resolve_path(found.registry, rest)
            other = open_checkpoint(found.registry, path, config.load_format)
            try:
                other = with_target_config(other, checkpoint.config)
                drafter = _build(found, other, kind)
                _borrow(drafter, target, other)
            finally:
                other.weights.close()
        else:
            return None, options
    except VllmxError as error:
        raise _named(error) from error
    spec = None if drafter is None else drafter.shape.drafts
    if drafter is None or spec is None:
        return None, options
    if config.deterministic or config.num_ranks > 1:
        who = "--deterministic" if config.deterministic else "a model on several ranks"
        raise ConfigError(
            f"--speculate {config.speculate}: {who} keeps no hidden states for drafters yet: choose"
            " ngram, suffix or off, or a draft model that needs none",
            param="speculate",
        )
    if spec.hidden_size != target.shape.hidden_size:
        raise ConfigError(
            f"--speculate {config.speculate}: the drafter was made for hidden states of"
            f" {spec.hidden_size} numbers, the model has {target.shape.hidden_size}: choose"
            " the drafter of this model",
            param="speculate",
        )
    step_tokens = max(options.max_num_batched_tokens, options.num_seqs)
    step_tokens = -(-step_tokens // _STEP_UNIT) * _STEP_UNIT
    taps = TapSpec(spec.points, spec.own, KEPT_STEPS * step_tokens, step_tokens)
    return taps, _with_room(options, target, drafter, free_bytes)


def _with_room(options: LoadOptions, target: Model, drafter: Model, free_bytes: int) -> LoadOptions:
    """Leaves memory for the drafter's weights and for as many KV blocks as the target will have,
    where the target would take a share of all."""
    if options.num_kv_blocks is not None or options.kv_cache_memory_bytes is not None:
        return options
    spec = drafter.shape.drafts
    reads_pages = spec is not None and spec.reads_pages
    tokens = [
        sum(kv.num_kv_heads * (kv.head_size + kv.value_size) for kv in model.shape.kv_specs)
        for model in ((target,) if reads_pages else (target, drafter))
    ]
    shared = {spec.parts for spec in target.weights()}
    own = (spec for spec in drafter.weights() if spec.parts not in shared)
    size = 2 if drafter.shape.dtype != "f32" else 4
    weights = size * sum(spec.count * spec.rows * max(1, spec.cols) for spec in own)
    share = options.memory_fraction * tokens[0] / max(1, sum(tokens))
    return replace(options, memory_fraction=max(0.0, share - weights / max(1, free_bytes)))


def _heads(found: FoundModel, target: Model, checkpoint: Checkpoint) -> Model | None:
    """The heads of a checkpoint; None for `auto` without them. Raises ConfigError."""
    reason, drafter = "", _build_heads(target, checkpoint)
    if found.config.num_ranks > 1:
        reason = "a model on several ranks keeps no hidden states for heads yet"
    elif found.config.deterministic:
        reason = "--deterministic keeps no hidden states for heads yet"
    elif drafter is None:
        reason = "the model has no layers of multi-token prediction"
    else:
        read, names = set(_names(target)), checkpoint.weights.names()
        own = [name for name in _names(drafter) if name not in read]
        if not any(name in names for name in own):
            reason = f"the checkpoint has no tensors of heads, such as {own[0]}"
    if not reason:
        return drafter
    if found.config.speculate == "auto":
        return None
    raise ConfigError(
        f"{reason}: choose a checkpoint with them, ngram, suffix or off", param="speculate"
    )


class LoadedDrafter(Record):
    """A model that drafts, with or without hidden states."""

    model: LoadedModel
    max_model_len: int
    """The longest sequence for which it drafts; it has no tables for later positions."""
    shares_pages: bool
    num_ids: int
    """The first ids, which it shares with the target."""
    num_own_rows: int = 0
    """Rows of its own parts of the store of hidden states; 0: it reads none."""
    drafts: DraftSpec | None = None
    """Set for one that reads hidden states."""

    def driver(self, table: RowTable, limits: Limits) -> DraftModel:
        """The drafter of an engine core."""
        group, spec = limits.windows.index(None), self.drafts
        given = (self.model, table, group, self.num_ids, self.max_model_len)
        if spec is None:
            return DraftModel(*given, shares_pages=self.shares_pages)
        kind, rows = BlockDrafter if spec.block else HiddenDrafter, self.num_own_rows
        return kind(*given, own_rows=rows, step_tokens=rows, spec=spec)


class DraftTarget(Record):
    """The model that a drafter is loaded for."""

    loaded: LoadedModel
    model: Model
    config: Mapping[str, Any]
    """The config.json of its checkpoint."""
    max_model_len: int
    taps: TapSpec | None = None
    """The hidden states that it keeps for the drafter."""


def load_drafter(found: FoundModel, spec: BackendSpec, target: DraftTarget) -> LoadedDrafter:
    """Loads the draft model that `EngineConfig.speculate` names, on the target's backend.

    Raises:
        ConfigError: it has another vocabulary, or the target cannot verify drafts of a model.
        CapacityError: it does not fit into the memory that the target leaves.
        VllmxError: it cannot be read; the message names --speculate.
    """
    config, taps = found.config, target.taps
    kind, _, rest = config.speculate.partition(":")
    _check_target(found, target.loaded)
    try:
        path = resolve_path(found.registry, rest) if kind == "model" else found.path
        checkpoint = open_checkpoint(found.registry, path, config.load_format)
    except VllmxError as error:
        raise _named(error) from error
    try:
        if kind == "layers":
            checkpoint = replace(checkpoint, config=_first_layers(checkpoint.config, int(rest)))
        if kind == "model":
            checkpoint = with_target_config(checkpoint, target.config)
        model = _build(found, checkpoint, kind)
        num_ids = _num_ids(found, checkpoint, model, target.model.shape.vocab_size)
        if kind == "twin":
            checkpoint = _quantised(found, checkpoint, model)
        elif kind == "heads" and config.isq is not None:
            checkpoint = quantise_in_situ(found.registry, checkpoint, model, config.isq)
        if kind == "model" and (borrowed := _borrow(model, target.model, checkpoint)):
            checkpoint = with_target_weights(found, checkpoint, borrowed)
        if kind == "model":
            checkpoint = with_mask_embedding(checkpoint, model)
        hidden = _hidden_states(model, target.loaded)
        options = _options(found, model, target.loaded, hidden, target.max_model_len, kind)
        loaded: LoadedModel = spec.load()().load(model, checkpoint.weights, options)
    except VllmxError as error:
        raise _named(error) from error
    finally:
        checkpoint.weights.close()
    logger.info("drafting by %s, %.0f MB", config.speculate, loaded.info.weight_bytes / 1e6)
    own_rows = 0 if options.hidden is None or taps is None else taps.own_rows
    return LoadedDrafter(
        loaded,
        options.max_model_len,
        shares_pages=options.pages is not None,
        num_ids=num_ids,
        num_own_rows=own_rows,
        drafts=model.shape.drafts,
    )


def _build(found: FoundModel, checkpoint: Checkpoint, kind: str) -> Model:
    """The architecture of a drafter."""
    model = choose_model(found.registry, checkpoint, OWN, "auto", "generate").model
    heads = _build_heads(model, checkpoint) if kind == "heads" else None
    return model if heads is None else heads


def _names(model: Model) -> list[str]:
    """The tensors that a model may read, under all names."""
    parts = (part for weight in model.weights() for part in weight.parts)
    return [one.name for part in parts for one in choices(part)]


def _borrow(
    drafter: Any, target: Model, checkpoint: Checkpoint
) -> Collection[tuple[PartSpec, ...]]:
    """The parts of its target's weights that a drafter takes where its file has none."""
    if drafter.shape.drafts is None:
        return ()
    drafter.borrow(target, checkpoint.weights.names())
    found: Collection[tuple[PartSpec, ...]] = drafter.borrowed.values()
    return found


def _build_heads(target: Model, checkpoint: Checkpoint) -> Model | None:
    heads: Any = heads_of(target)
    return None if heads is None else heads.with_stored_head(checkpoint.weights)


def _num_ids(found: FoundModel, checkpoint: Checkpoint, model: Model, vocab_size: int) -> int:
    """The first ids of the target, which a drafter has too. Raises ConfigError for one that cannot
    draft for a model with this vocabulary."""
    if model.shape.states:
        raise ConfigError(
            "it keeps recurrent states, and only models without draft yet: choose ngram, suffix or"
            " off",
            param="speculate",
        )
    if not found.config.speculate.startswith("model:"):
        return vocab_size
    return num_shared_ids(found, checkpoint, model.shape.vocab_size, vocab_size)


def _quantised(found: FoundModel, checkpoint: Checkpoint, model: Model) -> Checkpoint:
    """The checkpoint of a twin. Raises ConfigError."""
    try:
        return quantise_in_situ(found.registry, checkpoint, model, _TWIN_TYPE)
    except ConfigError as error:
        raise ConfigError(
            "a twin is made of weights with 16 or 32 bits, which the model's are not: choose ngram,"
            " suffix or model:PATH",
            param="speculate",
        ) from error


def _options(
    found: FoundModel,
    model: Model,
    target: LoadedModel,
    hidden: Any,
    max_model_len: int,
    kind: str,
) -> LoadOptions:
    info = target.info
    is_part = kind == "twin" or (kind == "layers" and len(info.cache_windows) == 1)
    pages = target.pages if is_part and isinstance(target, HasPages) else None
    if model.shape.drafts is not None and model.shape.drafts.reads_pages:
        pages = hidden.pages
    shares = pages is not None
    # A drafter of hidden states computes all tokens of its target, whatever its config claims.
    longest = model.shape.max_model_len if hidden is None else max_model_len
    return LoadOptions(
        dtype=found.config.dtype,
        kv_cache_dtype=info.kv_cache_dtype if shares else "auto",
        max_model_len=min(longest, info.num_kv_blocks * info.block_size),
        shrink_to_fit=True,
        memory_fraction=0.9 if hidden is None else 1.0,  # some was left for it
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        group_caches=shares,
        pages=pages,
        hidden=hidden,
        num_threads=found.config.num_threads,
        enforce_eager=found.config.enforce_eager,
        progress=found.progress,
    )


def _hidden_states(model: Model, target: LoadedModel) -> Any:
    """The target's share for a drafter, for `LoadOptions.hidden`, with the weights that both have;
    None for one that reads none. Raises ConfigError."""
    if model.shape.drafts is None:
        return None
    found = target.hidden if isinstance(target, HasHidden) else None
    if not isinstance(found, Hidden):
        raise ConfigError(
            f"backend {target.info.backend!r} keeps no hidden states for drafters: choose"
            " --backend cpu, cuda, metal, torch or numpy, or another drafter",
            param="speculate",
        )
    borrowed = getattr(model, "borrowed", None)
    if borrowed is None:  # heads, in the target's own file
        return found
    shared = {key: one for key, one in found.matrices.items() if key[0] in borrowed.values()}
    return replace(found, matrices=shared)


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
    if target.info.num_stages > 1:
        reason = "a model in stages has no draft model yet"
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


def num_shared_ids(found: FoundModel, draft: Checkpoint, own_size: int, target_size: int) -> int:
    """The number of first ids that both have, by the sizes of their embeddings. Raises ConfigError
    if ids are other tokens, or if sizes differ and a tokenizer is missing."""
    shared = min(own_size, target_size)
    own = _tokens(found, draft.path)
    target = _tokens(found, Path(found.config.tokenizer or found.path))
    if own is None or target is None:
        if own_size == target_size:
            return shared
        raise ConfigError(
            f"its vocabulary has {own_size} tokens, that of the model {target_size}, and without"
            " the tokenizers of both they cannot be compared: choose a draft model of the same"
            " family, with its tokenizer.json",
            param="speculate",
        )
    both = [index for index in own.keys() & target.keys() if index < shared]
    other = [index for index in both if own[index] != target[index]]
    if not both or len(other) > _MOST_OTHER * len(both):
        first = min(other, default=None)
        shown = "" if first is None else f", such as {first}: {own[first]!r}, not {target[first]!r}"
        raise ConfigError(
            f"its vocabulary is not the model's: {len(other)} of the {len(both)} ids of both stand"
            f" for other tokens{shown}; choose a draft model of the same family",
            param="speculate",
        )
    if other:
        logger.info("%d ids of the draft model stand for other tokens", len(other))
    return shared


def _tokens(found: FoundModel, place: Path) -> Mapping[int, str] | None:
    """Tokens by their ids as the tokenizer.json of a folder, or a model's file, names them; None:
    there are none."""
    if (place / TOKENIZER_NAME).is_file():
        vocabulary = Tokenizer.from_folder(place).backend.get_vocab(with_added_tokens=True)
        return {index: token for token, index in vocabulary.items()}
    if place.is_dir():
        return None
    checkpoint = open_checkpoint(found.registry, place)
    checkpoint.weights.close()
    known = checkpoint.tokenizer
    return None if known is None else dict(enumerate(GGUFVocabulary(known).tokens))
