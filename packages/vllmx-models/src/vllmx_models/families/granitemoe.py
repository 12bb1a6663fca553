"""Granite 3 with experts, such as 1B-A400M and 3B-A800M (GraniteMoeForCausalLM): Granite's
multipliers around experts that lie as one tensor, or gates and the rest apart in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.moe import (
    EachExpert,
    EitherExperts,
    JoinedExperts,
    MoE,
    Router,
    StackedExperts,
)
from vllmx_models.config import ConfigReader
from vllmx_models.configs.moe import (
    EXPERT_KEYS,
    SPLIT,
    chosen_experts,
    experts_spec,
    num_experts,
)
from vllmx_models.families.granite import (
    MULTIPLIERS,
    granite_config,
    granite_decoder,
    granite_states,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    INTERLEAVED,
    GGUFArchitecture,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

TENSORS = EitherExperts(
    StackedExperts("input_linear.weight", "output_linear.weight"),
    JoinedExperts("input_linear", "output_linear"),
)
"""Quantised checkpoints have two tensors for each expert."""


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
        EachExpert() if read.flag(SPLIT, False) else TENSORS,
        module="block_sparse_moe",
    )
    return granite_decoder(read, moe)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    config = granite_config(header, "expert_count") | experts_config(header)
    return config | {"intermediate_size": config["moe_intermediate_size"], SPLIT: True}


_MODULE = "model.layers.{}.block_sparse_moe"
GGUF = GGUFArchitecture(
    "GraniteMoeForCausalLM",
    {
        **DECODER_TENSORS,
        "blk.{}.ffn_gate_inp": f"{_MODULE}.router.layer",
        "blk.{}.ffn_gate_exps": f"{_MODULE}.experts.{{}}.gate_proj",
        "blk.{}.ffn_up_exps": f"{_MODULE}.experts.{{}}.up_proj",
        "blk.{}.ffn_down_exps": f"{_MODULE}.experts.{{}}.down_proj",
    },
    interleaved=INTERLEAVED,
    config=_gguf_config,
    states=granite_states,
)
