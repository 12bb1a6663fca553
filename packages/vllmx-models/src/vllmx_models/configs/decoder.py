"""Reads config.json into a `DecoderSpec`: the keys that decoder architectures share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.model import Activation

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.norms import PRE, LayerNorms, Norm
from vllmx_models.blocks.rope import LAYER_TYPES, Rope, read_rope
from vllmx_models.config import ConfigReader
from vllmx_models.trunks.decoder import DecoderSpec, LayerSpec

logger = logging.getLogger("vllmx.models")
MAX_LAYERS = 1024
PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys with the number of multi-token prediction layers, which a drafter reads."""


def num_layers(read: ConfigReader) -> int:
    return read.integer("num_hidden_layers", high=MAX_LAYERS)


def head_size(read: ConfigReader, default: int | None = None) -> int:
    """`head_dim`; without it `default`, or hidden size over heads, which must come out even."""
    if read.has("head_dim"):
        return read.integer("head_dim", high=4096)
    if default is not None:
        return default
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if hidden % heads:
        raise read.error("hidden_size", f"is not a multiple of num_attention_heads = {heads}")
    return hidden // heads


def layer_ropes(
    read: ConfigReader,
    head: int,
    sliding: Sequence[bool],
    *,
    default_positions: int,
    default_theta: float = 10000.0,
) -> list[Rope | None]:
    """The RoPE of each layer: one for all, or one for each layer type."""
    positions = read.integer("max_position_embeddings", default_positions)
    full, window = (
        read_rope(
            read.config,
            head,
            layer_type=layer_type,
            max_positions=positions,
            default_theta=default_theta,
        )
        for layer_type in ("full_attention", "sliding_attention")
    )
    return [window if slides else full for slides in sliding]


def rotating_layers(read: ConfigReader) -> list[bool]:
    """True for each layer that rotates, from `no_rope_layers`, which has a 1 for it, else all but
    each fourth."""
    layers = num_layers(read)
    if read.config.get("no_rope_layers"):
        return [bool(entry) for entry in read.integers("no_rope_layers", layers)]
    interval = read.integer("no_rope_layer_interval", 4)
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def sliding_layers(read: ConfigReader, by_default: Sequence[bool]) -> list[bool]:
    """True for each layer with a sliding window, from `layer_types`, else `by_default`."""
    if not read.has("layer_types"):
        return list(by_default)
    types, count = read.config["layer_types"], len(by_default)
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise read.error("layer_types", f"must be a list of {' or '.join(known)}")
    if len(types) != count:
        raise read.error("layer_types", f"must have an entry for each of the {count} layers")
    return [kind == "sliding_attention" for kind in types]


def sliding_pattern(read: ConfigReader, every: int) -> list[bool]:
    """`layer_types`, else a window in all layers except each `every`-th."""
    return sliding_layers(read, [(layer + 1) % every != 0 for layer in range(num_layers(read))])


def scaled_where_full(read: ConfigReader, full_theta: float, sliding_theta: float) -> ConfigReader:
    """Returns a config with one RoPE for each layer type: `rope_scaling` applies to full attention,
    and sliding layers may have their own base."""
    config = read.config
    given = config.get("rope_parameters")
    if isinstance(given, dict) and any(key in LAYER_TYPES for key in given):
        return read
    scaling = config.get("rope_scaling") or given or {}
    if not isinstance(scaling, dict):
        raise read.error("rope_scaling", "must be an object")
    theta = read.number("rope_theta", full_theta)
    local = read.number("rope_local_base_freq", sliding_theta or theta)
    by_type = {
        "full_attention": {"rope_theta": theta, **scaling},
        "sliding_attention": {"rope_theta": local},
    }
    changed = {**config, "rope_scaling": None, "rope_parameters": by_type}
    return ConfigReader(changed, read.architecture)


def switched_window(read: ConfigReader, default: int | None) -> int | None:
    """`sliding_window` if `use_sliding_window` is set, else None."""
    if not read.flag("use_sliding_window", False):
        return None
    if "sliding_window" in read.config and not read.has("sliding_window"):
        return None
    if default is None and not read.has("sliding_window"):
        return None
    return read.integer("sliding_window", default, high=1 << 31)


def attention_mixer(
    read: ConfigReader, head: int, *, default_kv_heads: int | None = None, **options: Any
) -> AttentionMixer:
    """The mixer with the config's head counts; `options` are `AttentionMixer`'s."""
    heads = read.integer("num_attention_heads", high=1 << 16)
    kv_heads = read.integer("num_key_value_heads", default_kv_heads or heads, high=1 << 16)
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    return AttentionMixer(heads, kv_heads, head, **options)


def dense_mlp(read: ConfigReader, activation: Activation | None = None, **options: Any) -> DenseMLP:
    """The feed-forward of `intermediate_size`; `options` are `DenseMLP`'s."""
    return DenseMLP(read.integer("intermediate_size"), activation or read.activation(), **options)


def rms(read: ConfigReader, offset: float = 0.0) -> Norm:
    """An RMS norm by `rms_norm_eps`."""
    return Norm(read.number("rms_norm_eps", 1e-6), offset=offset)


def layer_specs(
    read: ConfigReader,
    mixer: AttentionMixer,
    feed_forward: FeedForward,
    ropes: Sequence[Rope | None],
    sliding: Sequence[bool],
    window: int | None,
    norms: LayerNorms = PRE,
) -> tuple[LayerSpec, ...]:
    """Layers that differ only in RoPE and window. Raises UnsupportedModelError for sliding layers
    without a window."""
    if window is None and any(sliding):
        raise read.error(
            "layer_types", "has sliding layers, but sliding_window is not set or not in use"
        )
    return tuple(
        LayerSpec(replace(mixer, rope=rope, window=window if slides else None), feed_forward, norms)
        for rope, slides in zip(ropes, sliding, strict=True)
    )


def decoder_spec(
    read: ConfigReader,
    layers: tuple[LayerSpec, ...],
    *,
    default_positions: int,
    default_tied: bool = False,
    norm: Norm | None = None,
    context: int | None = None,
    **options: Any,
) -> DecoderSpec:
    """The decoder with the keys that all architectures share; `options` are `DecoderSpec`'s.

    `norm` defaults to an RMS norm. The maximum context is `context`, or that of the longest RoPE.
    Multi-token prediction layers, the last ones in a checkpoint, are not part of it.
    """
    for key in PREDICTION:
        if extra := read.integer(key, 0, low=0):
            logger.info("the checkpoint has layers of multi-token prediction: %d", extra)
    positions = read.integer("max_position_embeddings", default_positions)
    mixers = [layer.mixer for layer in layers if layer.mixer is not None]
    claims = [mixer.rope.context_len for mixer in mixers if mixer.rope is not None]
    return DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        layers=layers,
        max_model_len=context or max(claims, default=positions),
        dtype=read.dtype(),
        norm=rms(read) if norm is None else norm,
        tied_embeddings=read.flag("tie_word_embeddings", default_tied),
        **options,
    )
