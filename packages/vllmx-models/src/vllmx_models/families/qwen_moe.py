"""Qwen1.5-MoE, Qwen2-MoE (Qwen2MoeForCausalLM) and Qwen3-MoE such as 30B-A3B (Qwen3MoeForCausalLM).

The attention of the dense models with experts instead of the MLP. Qwen2-MoE adds a shared expert,
weighted by a sigmoid gate; Qwen3-MoE has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.moe import MoE, Router
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
    sliding_layers,
    switched_window,
)
from vllmx_models.configs.moe import (
    EXPERT_KEYS,
    chosen_experts,
    experts_spec,
    layer_numbers,
    num_experts,
    with_feed_forward,
)
from vllmx_models.families.qwen import DEFAULT_POSITIONS, WINDOW_KEYS
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, LayerSpec

SHARED = MLPNames("mlp.shared_expert")


def qwen2_moe(config: Mapping[str, Any]) -> Decoder:
    """A window, if enabled, applies to every other layer below `max_window_layers`."""
    read = ConfigReader(config, "Qwen2MoeForCausalLM")
    read.refuse_quirks("attention_bias", *EXPERT_KEYS, *WINDOW_KEYS)
    mixer = attention_mixer(read, head_size(read), qkv_bias=read.flag("qkv_bias", True))
    window, first = switched_window(read, 4096), read.integer("max_window_layers", 28, low=0)
    numbers = range(num_layers(read))
    sliding = sliding_layers(
        read, [window is not None and number < first and number % 2 == 0 for number in numbers]
    )
    ropes = layer_ropes(read, mixer.head_size, sliding, default_positions=DEFAULT_POSITIONS)
    shared = DenseMLP(
        read.integer("shared_expert_intermediate_size"), read.activation(), names=SHARED
    )
    moe = qwen_moe(read, shared=shared, shared_gate="shared_expert_gate")
    layers = layer_specs(read, mixer, moe, ropes, sliding, window)
    return Decoder(
        decoder_spec(read, with_dense(read, layers), default_positions=DEFAULT_POSITIONS)
    )


def qwen_moe(read: ConfigReader, size: str = "moe_intermediate_size", **options: Any) -> MoE:
    """Experts with softmax scores, renormalised if `norm_topk_prob`.

    `size` is the key of an expert's intermediate size; `options` are `MoE`'s."""
    count = num_experts(read)
    route = RouteSpec(chosen_experts(read, count), renormalise=read.flag("norm_topk_prob", False))
    return MoE(count, read.integer(size), Router(route), experts_spec(read), **options)


def with_dense(read: ConfigReader, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Replaces experts by an MLP in `mlp_only_layers` and off every `decoder_sparse_step`."""
    step, only = read.integer("decoder_sparse_step", 1), layer_numbers(read, "mlp_only_layers")
    dense = [number for number in range(len(layers)) if number in only or (number + 1) % step]
    return with_feed_forward(layers, dense, dense_mlp(read)) if dense else layers


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files have experts in every layer; their weights are not renormalised."""
    config = decoder_config(header, "expert_count") | experts_config(header)
    return config | {"qkv_bias": "blk.0.attn_q.bias" in header.tensors}


_SHARED = "model.layers.{}.mlp.shared_expert"
GGUF = GGUFArchitecture(
    "Qwen2MoeForCausalLM",
    {
        **DECODER_TENSORS,
        **EXPERT_TENSORS,
        "blk.{}.ffn_gate_inp_shexp": f"{_SHARED}_gate",
        "blk.{}.ffn_gate_shexp": f"{_SHARED}.gate_proj",
        "blk.{}.ffn_up_shexp": f"{_SHARED}.up_proj",
        "blk.{}.ffn_down_shexp": f"{_SHARED}.down_proj",
    },
    config=_gguf_config,
)


def qwen3_moe(config: Mapping[str, Any]) -> Decoder:
    """Qwen3's attention; a window, if enabled, applies to every layer."""
    read = ConfigReader(config, "Qwen3MoeForCausalLM")
    honoured = ["attention_bias", "sliding_window", "use_sliding_window", *EXPERT_KEYS]
    if config.get("use_qk_norm") is True:  # Qwen3-Coder's config states Qwen3's norms
        honoured.append("use_qk_norm")
    read.refuse_quirks(*honoured)
    bias = read.flag("attention_bias", False)
    mixer = attention_mixer(read, head_size(read), qk_norm=rms(read), qkv_bias=bias, o_bias=bias)
    window = switched_window(read, 4096)
    sliding = [window is not None] * num_layers(read)
    unwindowed = [False] * len(sliding)  # one RoPE for all layers
    ropes = layer_ropes(read, mixer.head_size, unwindowed, default_positions=DEFAULT_POSITIONS)
    layers = layer_specs(read, mixer, qwen_moe(read), ropes, sliding, window)
    return Decoder(
        decoder_spec(read, with_dense(read, layers), default_positions=DEFAULT_POSITIONS)
    )


def _qwen3_config(header: GGUFHeader) -> dict[str, Any]:
    """Files have experts in every layer; their weights are renormalised."""
    config = decoder_config(header, "expert_count") | experts_config(header)
    return config | {"norm_topk_prob": True}


QWEN3_GGUF = GGUFArchitecture(
    "Qwen3MoeForCausalLM",
    {**DECODER_TENSORS, **HEAD_NORM_TENSORS, **EXPERT_TENSORS},
    config=_qwen3_config,
)
