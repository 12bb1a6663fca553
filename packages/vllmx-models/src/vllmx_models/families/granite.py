"""Dense Granite 3 and 4 (GraniteForCausalLM) and Granite 3 MoE such as 1B-A400M
(GraniteMoeForCausalLM).

Llama with four multipliers: of embeddings, of scores, of each block's output and (a divisor) of
logits. The MoE models store gate and up of all experts as one tensor; GGUF files store them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.moe import (
    EachExpert,
    EitherExperts,
    JoinedExperts,
    MoE,
    Router,
    StackedExperts,
)
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
from vllmx_models.configs.moe import (
    EXPERT_KEYS,
    SPLIT,
    chosen_experts,
    experts_spec,
    num_experts,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    INTERLEAVED,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 2048
MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)


def granite(config: Mapping[str, Any]) -> Decoder:
    """Granite's multipliers with an MLP in each layer."""
    read = ConfigReader(config, "GraniteForCausalLM")
    read.refuse_quirks("attention_bias", "mlp_bias", *MULTIPLIERS)
    return granite_decoder(read, dense_mlp(read, bias=read.flag("mlp_bias", False)))


def granite_decoder(read: ConfigReader, feed_forward: FeedForward) -> Decoder:
    """A decoder with Granite's multipliers and `feed_forward` in each layer."""
    bias, head = read.flag("attention_bias", False), head_size(read)
    sliding = [False] * num_layers(read)
    mixer = attention_mixer(
        read, head, qkv_bias=bias, o_bias=bias, scale=read.number("attention_multiplier", 1.0)
    )
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    return Decoder(
        decoder_spec(
            read,
            layer_specs(read, mixer, feed_forward, ropes, sliding, None),
            default_positions=DEFAULT_POSITIONS,
            embedding_scale=read.number("embedding_multiplier", 1.0),
            residual_scale=read.number("residual_multiplier", 1.0),
            logit_scale=1 / read.number("logits_scaling", 1.0),
        )
    )


def granite_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The config.json of a Granite's GGUF header; `honoured` as in `decoder_config`."""
    keys = "embedding_scale", "residual_scale", "attention.scale", "logit_scale"
    config = decoder_config(header, *keys, *honoured)
    embedding, residual, _, logits = keys
    return {
        **config,
        "embedding_multiplier": header.number(embedding, 1.0),
        "residual_multiplier": header.number(residual, 1.0),
        "attention_multiplier": header.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": header.number(logits, 1.0),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def granite_states(spec: DecoderSpec) -> dict[str, Any]:
    """GGUF metadata specific to Granite."""
    mixer = next(one for one in spec.mixers if isinstance(one, AttentionMixer))
    return {
        "embedding_scale": spec.embedding_scale,
        "residual_scale": spec.residual_scale,
        "attention.scale": mixer.scale,
        "logit_scale": 1 / spec.logit_scale,
    }


GGUF = GGUFArchitecture(
    "GraniteForCausalLM", interleaved=INTERLEAVED, config=granite_config, states=granite_states
)


TENSORS = EitherExperts(
    StackedExperts("input_linear.weight", "output_linear.weight"),
    JoinedExperts("input_linear", "output_linear"),
)
"""Quantised checkpoints have two tensors per expert."""


def granitemoe(config: Mapping[str, Any]) -> Decoder:
    """Expert weights are a softmax over the selected experts only."""
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


def _granitemoe_config(header: GGUFHeader) -> dict[str, Any]:
    config = granite_config(header, "expert_count") | experts_config(header)
    return config | {"intermediate_size": config["moe_intermediate_size"], SPLIT: True}


_MODULE = "model.layers.{}.block_sparse_moe"
MOE_GGUF = GGUFArchitecture(
    "GraniteMoeForCausalLM",
    {
        **DECODER_TENSORS,
        "blk.{}.ffn_gate_inp": f"{_MODULE}.router.layer",
        "blk.{}.ffn_gate_exps": f"{_MODULE}.experts.{{}}.gate_proj",
        "blk.{}.ffn_up_exps": f"{_MODULE}.experts.{{}}.up_proj",
        "blk.{}.ffn_down_exps": f"{_MODULE}.experts.{{}}.down_proj",
    },
    interleaved=INTERLEAVED,
    config=_granitemoe_config,
    states=granite_states,
)
