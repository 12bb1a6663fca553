"""Mistral 7B, Nemo, Small, Large (MistralForCausalLM), Ministral 3 (Ministral3ForCausalLM) and
Mixtral 8x7B, 8x22B (MixtralForCausalLM).

Llama's layout; a sliding window, if set, applies to every layer (arXiv:2310.06825). Mixtral has a
few large experts in place of the MLP (arXiv:2401.04088), Ministral 3 queries that grow with their
position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.blocks.query_scale import QueryScale, read_query_scale
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
)
from vllmx_models.configs.moe import EXPERT_KEYS, chosen_experts, experts_spec, num_experts
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    INTERLEAVED,
    GGUFArchitecture,
    decoder_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.rope import with_query_scale
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 4096 * 32
DEFAULT_WINDOW = 4096
"""The default of transformers; null turns the window off."""


def mistral(config: Mapping[str, Any]) -> Decoder:
    """Llama's layers with a sliding window."""
    read = ConfigReader(config, "MistralForCausalLM")
    return _decoder(read, windowed=read.has("sliding_window") or "sliding_window" not in config)


def ministral3(config: Mapping[str, Any]) -> Decoder:
    """Queries beyond the context before YaRN's scaling grow with their position."""
    given = {"rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 18, "head_dim": 128, **config}
    read, scale = read_query_scale(ConfigReader(given, "Ministral3ForCausalLM"))
    return _decoder(read, windowed=read.has("sliding_window"), query_scale=scale)


def _decoder(
    read: ConfigReader, *, windowed: bool, query_scale: QueryScale | None = None
) -> Decoder:
    read.refuse_quirks("rope_interleaved", "sliding_window")
    window = None
    if windowed:
        window = read.integer("sliding_window", DEFAULT_WINDOW, high=1 << 31)
    head, sliding = head_size(read), [window is not None] * num_layers(read)
    # one RoPE for all layers: the window is not a layer type here
    ropes = layer_ropes(read, head, [False] * len(sliding), default_positions=DEFAULT_POSITIONS)
    mixer = attention_mixer(
        read,
        head,
        default_kv_heads=8,
        query_scale=query_scale,
        interleaved=read.flag("rope_interleaved", False),
    )
    layers = layer_specs(read, mixer, dense_mlp(read), ropes, sliding, window)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


def mixtral(config: Mapping[str, Any]) -> Decoder:
    """Expert weights are a softmax over the selected experts only."""
    read = ConfigReader(config, "MixtralForCausalLM")
    read.refuse_quirks(*EXPERT_KEYS, "sliding_window")
    window = None
    if read.has("sliding_window"):
        window = read.integer("sliding_window", high=1 << 31)
    head, sliding = head_size(read), [window is not None] * num_layers(read)
    unwindowed = [False] * len(sliding)  # one RoPE for all layers
    ropes = layer_ropes(
        read, head, unwindowed, default_positions=DEFAULT_POSITIONS, default_theta=1e6
    )
    mixer = attention_mixer(read, head, default_kv_heads=8)
    count = num_experts(read)
    moe = MoE(
        count,
        read.integer("intermediate_size"),
        Router(RouteSpec(chosen_experts(read, count), renormalise=True)),
        experts_spec(read),
        EachExpert("w1", "w3", "w2"),
        module="block_sparse_moe",
    )
    layers = layer_specs(read, mixer, moe, ropes, sliding, window)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Mistral Small 3 in newer files, and Ministral 3."""
    config = decoder_config(header, "attention.sliding_window", "attention.temperature_scale")
    grows = header.has("attention.temperature_scale")
    return {
        **with_query_scale(header, config),
        "architectures": ["Ministral3ForCausalLM" if grows else "MistralForCausalLM"],
        "sliding_window": header.integer("attention.sliding_window", 0, low=0) or None,
    }


GGUF = GGUFArchitecture("Ministral3ForCausalLM", DECODER_TENSORS, INTERLEAVED, _gguf_config)
