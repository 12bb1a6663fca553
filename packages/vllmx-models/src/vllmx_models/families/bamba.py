"""IBM's Bamba (BambaForCausalLM): Mamba-2 with a few attention layers, whose RoPE rotates half of
each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.layer import Mixer
from vllmx_models.blocks.norms import LayerNorms
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    num_layers,
)
from vllmx_models.configs.hybrid import MAMBA_DEFAULTS, hybrid_layers, mamba_mixer
from vllmx_models.configs.moe import layer_numbers
from vllmx_models.trunks.decoder import Decoder, ModelNames

NORMS = LayerNorms(before_mlp="pre_ff_layernorm")
MLP = MLPNames("feed_forward")
NAMES = ModelNames(norm="model.final_layernorm")
DEFAULTS: Mapping[str, Any] = {
    **MAMBA_DEFAULTS,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
}
"""The defaults of transformers for absent keys."""


def bamba(config: Mapping[str, Any]) -> Decoder:
    """RoPE rotates half of each head, whatever the config says, as in transformers."""
    config = {**DEFAULTS, **config, "partial_rotary_factor": 0.5}
    read = ConfigReader(_without_factor(config), "BambaForCausalLM")
    read.refuse_quirks("attention_bias", "mlp_bias", "layer_types", "partial_rotary_factor")
    bias, head, count = read.flag("attention_bias", False), head_size(read), num_layers(read)
    positions = read.integer("max_position_embeddings")
    rope = layer_ropes(read, head, [False], default_positions=positions)[0]
    attention = attention_mixer(read, head, rope=rope, qkv_bias=bias, o_bias=bias)
    attends = layer_numbers(read, "attn_layer_indices")
    if any(not 0 <= layer < count for layer in attends):
        raise read.error("attn_layer_indices", f"must be layers from 0 to {count - 1}")
    mixers: dict[str, Mixer] = {"attention": attention}
    kinds = ["attention" if layer in attends else "mamba" for layer in range(count)]
    if "mamba" in kinds:
        mixers["mamba"] = mamba_mixer(read)
    mlp = dense_mlp(read, bias=read.flag("mlp_bias", False), names=MLP)
    layers = hybrid_layers(kinds, mixers, [mlp] * count, NORMS)
    return Decoder(decoder_spec(read, layers, default_positions=positions, names=NAMES))


def _without_factor(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config with `partial_rotary_factor` 0.5, if it has `rope_parameters`."""
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return config
    return {**config, "rope_parameters": {**given, "partial_rotary_factor": 0.5}}
