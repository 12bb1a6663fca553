"""Gemma 4 (Gemma4ForCausalLM, Gemma4ForConditionalGeneration), without audio.

Unlike Gemma 3, full-attention layers have larger heads and use keys as values, layers get per-layer
embeddings, and experts run in parallel to the MLP. Sliding layers may attend bidirectionally within
an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import FeatureSpec

from vllmx_models.blocks.attention import AttentionMixer, AttentionNames
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.dense_and_experts import DenseAndExperts
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.norms import SANDWICH
from vllmx_models.blocks.per_layer import PerLayerInput
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    rms,
    sliding_pattern,
)
from vllmx_models.configs.text import inside_images, text_config
from vllmx_models.families.gemma import HEAD_SIZE, gemma_activation
from vllmx_models.formats.gguf.gemma4 import GGUF as GGUF
from vllmx_models.towers.gemma4 import gemma4_tower
from vllmx_models.trunks.decoder import Decoder, LayerSpec, ModelNames

DEFAULT_POSITIONS = 131072
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
_ROPES: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def gemma4_text(config: Mapping[str, Any]) -> Decoder:
    """The text model."""
    return gemma4(config)


def gemma4(config: Mapping[str, Any]) -> Decoder:
    """Layers from `num_kv_shared_layers` before the last on read the pages of the last of their
    kind before them."""
    read = ConfigReader(_with_ropes(text_config(config, _DEFAULTS)), "Gemma4ForCausalLM")
    read.refuse_quirks(
        "attention_bias",
        "layer_types",
        "sliding_window",
        "final_logit_softcapping",
        "num_experts",
        "use_bidirectional_attention",
    )
    if read.config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise read.error("use_bidirectional_attention", "is not served: text sees what came before")
    names = inside_images(config)
    sliding = sliding_pattern(read, 6)
    sliding[-1] = False
    spec = decoder_spec(
        read,
        tuple(_layers(read, sliding, names)),
        default_positions=DEFAULT_POSITIONS,
        default_tied=True,
        norm=rms(read),
        embedding_scale=read.integer("hidden_size") ** 0.5,
        logit_softcap=read.optional("final_logit_softcapping", 0),
        names=names,
    )
    tower = gemma4_tower(config, spec.hidden_size)
    if tower is None:
        return Decoder(spec)
    spans = read.config.get("use_bidirectional_attention") == "vision"
    padding = read.integer("pad_token_id", 0, low=0)
    features = FeatureSpec(1, spec.hidden_size, spans=spans, feeds=padding)
    return Decoder(replace(spec, features=features), tower)


def _with_ropes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config if config.get("rope_parameters") else {**config, "rope_parameters": _ROPES}


def _layers(read: ConfigReader, sliding: list[bool], names: ModelNames) -> list[LayerSpec]:
    owners = len(sliding) - read.integer("num_kv_shared_layers", 0, low=0, high=len(sliding) - 1)
    size = read.integer("hidden_size_per_layer_input", 256, low=0)
    vocab = read.integer("vocab_size_per_layer_input", 262144) if size else 0
    model, activation = names.embedding.removesuffix(".embed_tokens"), gemma_activation(read)
    layers = []
    for layer, slides in enumerate(sliding):
        shared = kv_owner(read, sliding[:owners], slides) if layer >= owners else None
        inputs = PerLayerInput(layer, size, vocab, activation, rms(read), model) if size else None
        mixer = _mixer(read, layer, slides, shared)
        fed = _feed_forward(read, shares=shared is not None)
        layers.append(LayerSpec(mixer, fed, SANDWICH, inputs, "layer_scalar"))
    return layers


def kv_owner(read: ConfigReader, owners: list[bool], slides: bool) -> int:
    """The last layer of the same kind with its own KV cache."""
    same = [layer for layer, kind in enumerate(owners) if kind == slides]
    if not same:
        raise read.error("num_kv_shared_layers", "leaves a kind of layer without keys and values")
    return same[-1]


def _mixer(read: ConfigReader, layer: int, slides: bool, shared: int | None) -> AttentionMixer:
    same = read.flag("attention_k_eq_v", False) and not slides
    sizes = ConfigReader({**read.config, **_sizes(read, layer, slides, same)}, read.architecture)
    bias, head = read.flag("attention_bias", False), head_size(sizes, HEAD_SIZE)
    return attention_mixer(
        sizes,
        head,
        default_kv_heads=4,
        rope=layer_ropes(read, head, [slides], default_positions=DEFAULT_POSITIONS)[0],
        window=read.integer("sliding_window", 512, high=1 << 31) if slides else None,
        scale=1.0,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=rms(read),
        v_norm=True,
        spans=slides and read.config.get("use_bidirectional_attention") == "vision",
        shared_with=shared,
        names=AttentionNames(v="k_proj") if same else AttentionNames(),
    )


def _sizes(read: ConfigReader, layer: int, slides: bool, same: bool) -> Mapping[str, Any]:
    """The head options that this layer overrides: by layer in new configs, else by layer type."""
    by_layer = read.config.get("per_layer_config")
    if by_layer is not None:
        own = by_layer.get(str(layer), {}) if isinstance(by_layer, Mapping) else None
        if not isinstance(own, Mapping) or own.keys() - {"head_dim", "num_key_value_heads"}:
            raise read.error("per_layer_config", "must have head_dim or num_key_value_heads alone")
        return own
    if slides:
        return {}
    sizes = {"head_dim": read.integer("global_head_dim", 512, high=4096)}
    if same and read.has("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = read.integer("num_global_key_value_heads", high=1 << 16)
    return sizes


def _feed_forward(read: ConfigReader, *, shares: bool) -> FeedForward:
    """Layers that share keys and values may have an MLP of double width."""
    wide = 2 if shares and read.flag("use_double_wide_mlp", False) else 1
    dense = DenseMLP(wide * read.integer("intermediate_size"), gemma_activation(read))
    if not read.flag("enable_moe_block", False):
        return dense
    count = read.integer("num_experts", high=1 << 16)
    chosen = read.integer("top_k_experts", high=count)
    return DenseAndExperts(dense, count, chosen, read.integer("moe_intermediate_size"), rms(read))
