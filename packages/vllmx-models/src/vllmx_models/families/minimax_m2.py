"""MiniMax M2, M2.1, M2.5 and M2.7 (MiniMaxM2ForCausalLM): Mixtral's layers with many small experts
that a sigmoid scores, and one norm across all query heads and one across all key heads."""

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
    rms,
)
from vllmx_models.configs.moe import EXPERT_KEYS, chosen_experts, experts_spec, num_experts
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    MIXTRAL_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 196608
FIXED: Mapping[str, Any] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}
"""Required values: every released model has these."""


def minimax_m2(config: Mapping[str, Any]) -> Decoder:
    """RoPE rotates `rotary_dim` dimensions of each head."""
    config = {"torch_dtype": "bfloat16", **config}
    read = ConfigReader(config, "MiniMaxM2ForCausalLM")
    read.refuse_quirks("partial_rotary_factor", "use_qk_norm", *EXPERT_KEYS)
    for key, value in FIXED.items():
        if read.has(key) and config[key] != value:
            raise read.error(key, f"is not known here; known: {value}")
    head, sliding = head_size(read, 128), [False] * num_layers(read)
    if read.has("rotary_dim"):
        share = read.integer("rotary_dim", high=head) / head
        read = ConfigReader({"partial_rotary_factor": share, **config}, read.architecture)
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS, default_theta=5e6)
    mixer = attention_mixer(
        read, head, default_kv_heads=8, qk_norm=rms(read), norm_weights="across"
    )
    count = num_experts(read)
    route = RouteSpec(chosen_experts(read, count), "sigmoid", renormalise=True)
    moe = MoE(
        count,
        read.integer("intermediate_size"),
        Router(route, choice_bias="e_score_correction_bias"),
        experts_spec(read),
        EachExpert("w1", "w3", "w2"),
        module="block_sparse_moe",
    )
    layers = layer_specs(read, mixer, moe, ropes, sliding, None)
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files have sigmoid scores."""
    config = decoder_config(header, "expert_count") | experts_config(header)
    if header.integer("expert_gating_func", 2) != 2:
        raise header.error("expert_gating_func", "must be 2, sigmoid")
    return config | {"intermediate_size": config["moe_intermediate_size"]}


GGUF = GGUFArchitecture(
    "MiniMaxM2ForCausalLM",
    {
        **DECODER_TENSORS,
        **HEAD_NORM_TENSORS,
        **MIXTRAL_TENSORS,
        "blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias",
    },
    config=_gguf_config,
)
