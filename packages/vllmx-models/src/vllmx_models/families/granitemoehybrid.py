"""Granite 4 (GraniteMoeHybridForCausalLM): a hybrid of Mamba-2 and attention without position
embedding, with Granite's multipliers, and optional experts in addition to a shared MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    num_layers,
)
from vllmx_models.configs.hybrid import MAMBA_DEFAULTS, hybrid_layers, layer_kinds, mamba_mixer
from vllmx_models.configs.moe import EXPERT_KEYS, SPLIT, chosen_experts, experts_spec
from vllmx_models.families.granite import (
    DEFAULT_POSITIONS,
    MULTIPLIERS,
    TENSORS,
    granite_config,
    granite_states,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    INTERLEAVED,
    GGUFArchitecture,
    experts_config,
)
from vllmx_models.formats.gguf.hybrids import (
    KV_HEADS,
    alike,
    attention_of,
    has_tensor,
    mamba_config,
    mamba_states,
    mamba_tensors,
    of_each_layer,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

_SHARED_LENGTH = "expert_shared_feed_forward_length"
KINDS = ("linear_attention", "full_attention", "mamba", "attention")
"""The last two names occur in published files."""
SHARED = MLPNames("shared_mlp", down="output_linear", gate_up="input_linear")
APART = MLPNames("shared_mlp", down="output_linear")
HONOURED = ("attention_bias", "layer_types", "position_embedding_type", *EXPERT_KEYS, *MULTIPLIERS)
DEFAULTS: Mapping[str, Any] = {
    **MAMBA_DEFAULTS,
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
    "num_experts_per_tok": 2,
}
"""The defaults of transformers for absent keys."""


def granitemoehybrid(config: Mapping[str, Any]) -> Decoder:
    """Attention has no position embedding unless `position_embedding_type` is rope."""
    read = ConfigReader({**DEFAULTS, **config}, "GraniteMoeHybridForCausalLM")
    read.refuse_quirks(*HONOURED)
    bias, head, count = read.flag("attention_bias", False), head_size(read), num_layers(read)
    rotates = read.config.get("position_embedding_type") == "rope"
    ropes = layer_ropes(read, head, [False], default_positions=DEFAULT_POSITIONS)
    attention = attention_mixer(
        read,
        head,
        rope=ropes[0] if rotates else None,
        qkv_bias=bias,
        o_bias=bias,
        scale=read.number("attention_multiplier", 1.0),
    )
    kinds = layer_kinds(read, KINDS, [KINDS[0]] * count)
    mixers: dict[str, Mixer] = {"full_attention": attention, "attention": attention}
    if set(kinds) & {"mamba", "linear_attention"}:
        mixers["mamba"] = mixers["linear_attention"] = mamba_mixer(read)
    layers = hybrid_layers(kinds, mixers, [_feed_forward(read)] * count)
    return Decoder(
        decoder_spec(
            read,
            layers,
            default_positions=DEFAULT_POSITIONS,
            embedding_scale=read.number("embedding_multiplier", 1.0),
            residual_scale=read.number("residual_multiplier", 1.0),
            logit_scale=1 / read.number("logits_scaling", 1.0),
        )
    )


def _feed_forward(read: ConfigReader) -> FeedForward:
    split = read.flag(SPLIT, False)
    inner, names = read.integer("shared_intermediate_size"), APART if split else SHARED
    shared = DenseMLP(inner, read.activation(), names=names)
    count = read.integer("num_local_experts", low=0, high=1 << 14)
    if not count:
        return shared
    return MoE(
        count,
        read.integer("intermediate_size"),
        Router(RouteSpec(chosen_experts(read, count), renormalise=True), "router.layer"),
        experts_spec(read),
        EachExpert() if split else TENSORS,
        shared=shared,
        module="block_sparse_moe",
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Layers without key/value heads are Mamba-2; gates are separate tensors."""
    config = granite_config(alike(header, KV_HEADS), "expert_count")
    dense = config["intermediate_size"]
    experts = {"num_local_experts": 0, "shared_intermediate_size": dense}
    if header.integer("expert_count", 0, low=0):
        found = experts_config(header)
        experts = {
            "num_local_experts": found["num_experts"],
            "num_experts_per_tok": found["num_experts_per_tok"],
            "intermediate_size": found["moe_intermediate_size"],
            "shared_intermediate_size": header.integer(_SHARED_LENGTH),
        }
    return {
        **config,
        **experts,
        SPLIT: True,
        "layer_types": [KINDS[2 + (kv > 0)] for kv in of_each_layer(header, KV_HEADS)],
        "position_embedding_type": "rope"
        if header.flag("rope.scaling.finetuned", False)
        else "nope",
        "attention_bias": has_tensor(header, "attn_q.bias"),
        **mamba_config(header),
    }


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    attention, feed_forward = attention_of(spec), spec.layers[0].feed_forward
    shared = feed_forward.shared if isinstance(feed_forward, MoE) else None
    return {
        **granite_states(spec),
        **mamba_states(spec),
        "rope.scaling.finetuned": attention.rope is not None,
        **({} if shared is None else {_SHARED_LENGTH: shared.intermediate_size}),
    }


_LAYER = "model.layers.{}"
_EXPERTS, _SHARED = f"{_LAYER}.block_sparse_moe", f"{_LAYER}.shared_mlp"
GGUF = GGUFArchitecture(
    "GraniteMoeHybridForCausalLM",
    {
        **DECODER_TENSORS,
        **mamba_tensors(f"{_LAYER}.mamba"),
        "blk.{}.ffn_gate": f"{_SHARED}.gate_proj",
        "blk.{}.ffn_up": f"{_SHARED}.up_proj",
        "blk.{}.ffn_down": f"{_SHARED}.output_linear",
        "blk.{}.ffn_gate_shexp": f"{_SHARED}.gate_proj",
        "blk.{}.ffn_up_shexp": f"{_SHARED}.up_proj",
        "blk.{}.ffn_down_shexp": f"{_SHARED}.output_linear",
        "blk.{}.ffn_gate_inp": f"{_EXPERTS}.router.layer",
        "blk.{}.ffn_gate_exps": f"{_EXPERTS}.experts.{{}}.gate_proj",
        "blk.{}.ffn_up_exps": f"{_EXPERTS}.experts.{{}}.up_proj",
        "blk.{}.ffn_down_exps": f"{_EXPERTS}.experts.{{}}.down_proj",
    },
    interleaved=INTERLEAVED,
    config=_gguf_config,
    states=_states,
    decays=("blk.{}.ssm_a",),
)
