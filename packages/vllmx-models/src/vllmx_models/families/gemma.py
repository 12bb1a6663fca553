"""Gemma (GemmaForCausalLM), and what all Gemmas share: a scaled embedding, and norms whose weights
are stored minus one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.model import Activation

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
)
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 8192
HEAD_SIZE = 256


def gemma(config: Mapping[str, Any]) -> Decoder:
    """Llama's layers with Gemma's embedding and norms."""
    read = ConfigReader(config, "GemmaForCausalLM")
    read.refuse_quirks("attention_bias")
    bias, head = read.flag("attention_bias", False), head_size(read, HEAD_SIZE)
    sliding = [False] * num_layers(read)
    mixer = attention_mixer(read, head, default_kv_heads=16, qkv_bias=bias, o_bias=bias)
    mlp = dense_mlp(read, gemma_activation(read))
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    return Decoder(
        decoder_spec(
            read,
            layer_specs(read, mixer, mlp, ropes, sliding, None),
            default_positions=DEFAULT_POSITIONS,
            default_tied=True,
            norm=rms(read, offset=1.0),
            embedding_scale=read.integer("hidden_size") ** 0.5,
        )
    )


def gemma_activation(read: ConfigReader) -> Activation:
    """The first configs say gelu and mean its approximation by tanh."""
    key = "hidden_activation" if read.has("hidden_activation") else "hidden_act"
    kind = read.activation(key, "gelu_pytorch_tanh")
    return "gelu_tanh" if kind == "gelu" else kind


def gemma_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """What files of all Gemmas say alike."""
    return decoder_config(header, *honoured) | {"hidden_act": "gelu_pytorch_tanh"}


GGUF = GGUFArchitecture("GemmaForCausalLM", config=gemma_config, norm_offset=1.0)
