"""gpt-oss 20b and 120b (GptOssForCausalLM): every other layer has a window, each head has
a sink, and the gates of the experts are clamped.

Checkpoints have the experts as MXFP4, which stays as it is, or dense with input features first, or
in other quantised formats a tensor for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.moe import (
    EachExpert,
    EitherExperts,
    ExpertTensors,
    MoE,
    Router,
    StackedExperts,
)
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
    sliding_layers,
)
from vllmx_models.configs.moe import EXPERT_KEYS, SPLIT, chosen_experts, num_experts
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 131072
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The RoPE of transformers for configs without one."""


def gpt_oss(config: Mapping[str, Any]) -> Decoder:
    """All matrices have biases. Expert weights are a softmax over the selected experts only."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_scaling": YARN}
    read = ConfigReader({"torch_dtype": "bfloat16", **config}, "GptOssForCausalLM")
    read.refuse_quirks("attention_bias", "sliding_window", "layer_types", *EXPERT_KEYS)
    bias = read.flag("attention_bias", True)
    mixer = attention_mixer(
        read, head_size(read, 64), default_kv_heads=8, qkv_bias=bias, o_bias=bias, sinks=True
    )
    sliding = sliding_layers(read, [number % 2 == 0 for number in range(num_layers(read))])
    window = read.integer("sliding_window", 128, high=1 << 31) if any(sliding) else None
    ropes = layer_ropes(
        read, mixer.head_size, sliding, default_positions=DEFAULT_POSITIONS, default_theta=150000.0
    )
    layers = layer_specs(read, mixer, _experts(read), ropes, sliding, window)
    norm = replace(rms(read), eps=read.number("rms_norm_eps", 1e-5))
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS, norm=norm))


def _experts(read: ConfigReader) -> MoE:
    if read.activation() != "silu":
        raise read.error("hidden_act", "must be silu, which the clamped gate is made of")
    count = num_experts(read)
    route = RouteSpec(chosen_experts(read, count), renormalise=True)
    clamped = ExpertsSpec(
        clamp=read.number("swiglu_limit", 7.0), alpha=read.number("swiglu_alpha", 1.702)
    )
    return MoE(
        count,
        read.integer("intermediate_size"),
        Router(route, "router", bias=True),
        clamped,
        _tensors(read),
    )


def _tensors(read: ConfigReader) -> ExpertTensors:
    each = EachExpert(bias=True)
    if read.flag(SPLIT, False):
        return each
    quantised = read.config.get("quantization_config")
    packed = isinstance(quantised, Mapping) and quantised.get("quant_method") == "mxfp4"
    stacked = StackedExperts(interleaved=True, transposed=not packed, bias=True)
    return EitherExperts(stacked, each)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Adds what files omit: the ends of YaRN's ramp are not rounded here."""
    window = "attention.sliding_window"
    config = decoder_config(header, window, f"{window}_pattern", "expert_count")
    if header.integer(f"{window}_pattern", 2) != 2:
        raise header.error(f"{window}_pattern", "must be 2: every other layer has a window")
    config |= experts_config(header)
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}
    return config | {
        "intermediate_size": config["moe_intermediate_size"],
        "rope_scaling": scaling,
        "sliding_window": header.integer(window),
        SPLIT: True,
    }


_LAYER = "model.layers.{}"
GGUF = GGUFArchitecture(
    "GptOssForCausalLM",
    {
        **{name: ours for name, ours in DECODER_TENSORS.items() if ".ffn_" not in name},
        **EXPERT_TENSORS,
        "blk.{}.ffn_gate_inp": f"{_LAYER}.mlp.router",
        "blk.{}.post_attention_norm": f"{_LAYER}.post_attention_layernorm",
        "blk.{}.attn_sinks.weight": f"{_LAYER}.self_attn.sinks",
    },
    config=_gguf_config,
)
