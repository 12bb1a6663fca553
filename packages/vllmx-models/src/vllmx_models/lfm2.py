"""LFM2 of Liquid AI, dense and with experts (Lfm2ForCausalLM, Lfm2MoeForCausalLM): short
convolutions between gates, and a few layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.blocks.short_conv import ConvMixer
from vllmx_models.config import ConfigReader
from vllmx_models.decoder import Decoder, ModelNames
from vllmx_models.decoder_config import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    num_layers,
)
from vllmx_models.hybrid_config import hybrid_layers, layer_kinds
from vllmx_models.moe_config import EXPERT_KEYS, chosen_experts, layer_numbers, num_experts

KINDS = ("conv", "full_attention")
ATTENTION = AttentionNames(o="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
MLP = MLPNames("feed_forward", "w1", "w3", "w2")
NORMS = LayerNorms("operator_norm", None, "ffn_norm")
NAMES = ModelNames(norm="model.embedding_norm")
DEFAULTS: Mapping[str, Any] = {
    "norm_eps": 1e-5, "max_position_embeddings": 128000, "rope_theta": 1_000_000.0,
    "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
}  # fmt: skip
"""What transformers takes where a config.json is silent."""


def lfm2(config: Mapping[str, Any]) -> Decoder:
    """A dense feed-forward in each layer, whose size may be a bound that is rounded."""
    read = _read(config, "Lfm2ForCausalLM")
    mlp = DenseMLP(_inner_size(read), names=MLP)
    return _decoder(read, [mlp] * num_layers(read))


def lfm2_moe(config: Mapping[str, Any]) -> Decoder:
    """Experts by sigmoid in all layers but the first ones."""
    read = _read(config, "Lfm2MoeForCausalLM")
    layers = num_layers(read)
    dense = read.integer("num_dense_layers", 2, low=0, high=layers)
    mlp = DenseMLP(read.integer("intermediate_size"), names=MLP)
    feed_forwards: list[FeedForward] = [mlp] * dense
    return _decoder(read, feed_forwards + [_experts(read)] * (layers - dense))


def _read(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    """Older files have other names for three of the keys."""
    names = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    older = {new: config[old] for old, new in names.items() if config.get(old) is not None}
    read = ConfigReader({**DEFAULTS, **config, **older}, architecture)
    read.refuse_quirks("layer_types", *EXPERT_KEYS)
    return read


def _decoder(read: ConfigReader, feed_forwards: list[FeedForward]) -> Decoder:
    norm, head = Norm(read.number("norm_eps")), head_size(read)
    layers, positions = len(feed_forwards), read.integer("max_position_embeddings")
    full = layer_numbers(read, "full_attn_idxs") or range(layers)
    kinds = layer_kinds(read, KINDS, [KINDS[layer in full] for layer in range(layers)])
    theta = read.number("rope_theta")
    rope = layer_ropes(read, head, [False], default_positions=positions, default_theta=theta)[0]
    mixers: dict[str, Mixer] = {
        "conv": ConvMixer(
            read.integer("hidden_size"),
            read.integer("conv_L_cache", low=2, high=64),
            read.flag("conv_bias", False),
        ),
        "full_attention": attention_mixer(read, head, rope=rope, qk_norm=norm, names=ATTENTION),
    }
    specs = hybrid_layers(kinds, mixers, feed_forwards, NORMS)
    return Decoder(
        decoder_spec(
            read, specs, default_positions=positions, default_tied=True, norm=norm, names=NAMES
        )
    )


def _inner_size(read: ConfigReader) -> int:
    """Two thirds of what is said, times a factor, up to the next multiple."""
    size = read.integer("intermediate_size")
    if not read.flag("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), read.integer("block_multiple_of")
    size = int(read.number("block_ffn_dim_multiplier") * size)
    return multiple * -(-size // multiple)


def _experts(read: ConfigReader) -> MoE:
    count = num_experts(read)
    route = RouteSpec(
        chosen_experts(read, count), "sigmoid", renormalise=read.flag("norm_topk_prob", True),
        eps=1e-6, scale=read.number("routed_scaling_factor", 1.0),
    )  # fmt: skip
    bias = "expert_bias" if read.flag("use_expert_bias", True) else None
    return MoE(
        count,
        read.integer("moe_intermediate_size"),
        Router(route, choice_bias=bias),
        tensors=EachExpert("w1", "w3", "w2"),
        module="feed_forward",
    )
