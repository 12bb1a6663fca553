"""Mixtral 8x7B and 8x22B (MixtralForCausalLM): Mistral's attention over a few large experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
)
from vllmx_models.configs.moe import EXPERT_KEYS, chosen_experts, experts_spec, num_experts
from vllmx_models.families.mistral import DEFAULT_POSITIONS
from vllmx_models.trunks.decoder import Decoder


def mixtral(config: Mapping[str, Any]) -> Decoder:
    """Scores by softmax over the chosen experts alone; a window is in all layers."""
    read = ConfigReader(config, "MixtralForCausalLM")
    read.refuse_quirks(*EXPERT_KEYS, "sliding_window")
    window = None
    if read.has("sliding_window"):
        window = read.integer("sliding_window", high=1 << 31)
    head, sliding = head_size(read), [window is not None] * num_layers(read)
    unwindowed = [False] * len(sliding)  # one rotation for all layers
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
