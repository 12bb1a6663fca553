"""Granite 3 with experts, such as 1B-A400M and 3B-A800M (GraniteMoeForCausalLM): Granite's
multipliers around experts that lie as one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.moe import MoE, Router, StackedExperts
from vllmx_models.config import ConfigReader
from vllmx_models.decoder import Decoder
from vllmx_models.granite import MULTIPLIERS, granite_decoder
from vllmx_models.moe_config import EXPERT_KEYS, chosen_experts, experts_spec, num_experts


def granitemoe(config: Mapping[str, Any]) -> Decoder:
    """Softmax over the chosen experts alone."""
    read = ConfigReader(config, "GraniteMoeForCausalLM")
    read.refuse_quirks("attention_bias", *MULTIPLIERS, *EXPERT_KEYS)
    count = num_experts(read)
    moe = MoE(
        count,
        read.integer("intermediate_size"),
        Router(RouteSpec(chosen_experts(read, count), renormalise=True), "router.layer"),
        experts_spec(read),
        StackedExperts("input_linear.weight", "output_linear.weight"),
        module="block_sparse_moe",
    )
    return granite_decoder(read, moe)
