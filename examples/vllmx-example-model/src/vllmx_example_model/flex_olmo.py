"""FlexOlmo (FlexOlmoForCausalLM): OLMo 2's attention, with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec
from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.blocks.norms import POST
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
)
from vllmx_models.trunks.decoder import Decoder

POSITIONS, THETA = 4096, 500000.0
"""What a config that does not say has: its context, and the base of its rotation."""


def flex_olmo(config: Mapping[str, Any]) -> Decoder:
    """Norms stand behind the blocks; queries have one norm across all heads, and so have keys."""
    read = ConfigReader(config, "FlexOlmoForCausalLM")
    read.refuse_quirks("attention_bias", "num_experts", "num_local_experts")
    bias, every_token = read.flag("attention_bias", False), [False] * num_layers(read)
    attention = attention_mixer(
        read,
        head_size(read),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=rms(read),
        norm_weights="across",
    )
    ropes = layer_ropes(
        read, attention.head_size, every_token, default_positions=POSITIONS, default_theta=THETA
    )
    layers = layer_specs(read, attention, experts(read), ropes, every_token, None, POST)
    return Decoder(decoder_spec(read, layers, default_positions=POSITIONS))


def experts(read: ConfigReader) -> MoE:
    """Weights are scores by softmax over all experts, which add up to one where the config says
    so."""
    count = read.integer("num_experts", 7, high=1 << 14)
    chosen = read.integer("num_experts_per_tok", 5)
    if chosen > count:
        raise read.error("num_experts_per_tok", f"must be at most num_experts = {count}")
    return MoE(
        count,
        read.integer("intermediate_size"),
        Router(RouteSpec(chosen, renormalise=read.flag("norm_topk_prob", False)), name="gate"),
        ExpertsSpec(read.activation()),
        EachExpert("gate_proj", "up_proj", "down_proj"),
        module="mlp",
    )
