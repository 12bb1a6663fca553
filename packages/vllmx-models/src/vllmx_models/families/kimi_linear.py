"""Kimi Linear (KimiLinearForCausalLM, arXiv:2510.26692): three layers of Kimi Delta Attention for
each one of latent attention without RoPE, and DeepSeek V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.kimi_delta import KimiDeltaMixer
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.moe import EachExpert, MoE
from vllmx_models.blocks.rope import still
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import decoder_spec, dense_mlp
from vllmx_models.configs.hybrid import hybrid_layers, layer_kinds
from vllmx_models.configs.latent import latent_mixer
from vllmx_models.configs.moe import (
    EXPERT_KEYS,
    experts_spec,
    layer_numbers,
    num_experts,
    sparse_layers,
)
from vllmx_models.families.deepseek import (
    CHOICE_BIAS,
    LATENT_TENSORS,
    latent_config,
    sigmoid_router,
)
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, experts_config
from vllmx_models.formats.gguf.hybrids import KV_HEADS, of_each_layer
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

KINDS = ("linear_attention", "full_attention")
MODULE = "block_sparse_moe"
DENSE = MLPNames(also=MODULE)
"""The dense feed-forward as transformers saves it, under the experts' name."""
RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names of keys in published files, by transformers' names."""
DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 1048576,
    "num_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "rms_norm_eps": 1e-5,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
"""The defaults of transformers for absent keys."""


def kimi_linear(config: Mapping[str, Any]) -> Decoder:
    """The config lists the layers of each kind; published files count them from one."""
    older = {new: config[old] for old, new in RENAMED.items() if config.get(old) is not None}
    read = ConfigReader({**DEFAULTS, **older, **config, **_linear(config)}, "KimiLinearForCausalLM")
    read.refuse_quirks("layer_types", *EXPERT_KEYS)
    if read.config.get("mla_use_nope") is False:
        raise read.error("mla_use_nope", "is not known here: true")
    sparse = sparse_layers(read)
    positions = read.integer("max_position_embeddings")
    latent = latent_mixer(read)
    turned = replace(latent, rope=still(latent.rope.rotary_dim, positions))
    mixers: dict[str, Mixer] = dict(zip(KINDS, (_delta(read), turned), strict=True))
    feed_forwards: dict[bool, FeedForward] = {False: dense_mlp(read, names=DENSE)}
    if any(sparse):
        feed_forwards[True] = _experts(read)
    kinds = layer_kinds(read, KINDS, _by_default(read, len(sparse)))
    layers = hybrid_layers(kinds, mixers, [feed_forwards[one] for one in sparse])
    return Decoder(decoder_spec(read, layers, default_positions=positions, context=positions))


def _linear(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of linear attention that published files nest in `linear_attn_config`."""
    given = config.get("linear_attn_config")
    if not isinstance(given, Mapping):
        return {}
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
        "full_attn_layers": "full_attn_layers",
    }
    return {new: given[old] for old, new in names.items() if given.get(old) is not None}


def _by_default(read: ConfigReader, count: int) -> list[str]:
    full = layer_numbers(read, "full_attn_layers")  # counted from one
    if not full:
        full = frozenset(range(5, count + 1, 4))
    return [KINDS[layer + 1 in full] for layer in range(count)]


def _delta(read: ConfigReader) -> KimiDeltaMixer:
    if read.activation() != "silu":
        raise read.error("hidden_act", "is not known here for convolutions: silu")
    return KimiDeltaMixer(
        read.integer("linear_num_heads", high=1 << 16),
        read.integer("linear_head_dim", high=4096),
        read.integer("linear_conv_kernel_dim", low=2, high=64),
        read.number("rms_norm_eps"),
    )


def _experts(read: ConfigReader) -> MoE:
    count, inner = num_experts(read), read.integer("moe_intermediate_size")
    every = read.integer("n_shared_experts", 0, low=0, high=256)
    names = MLPNames(f"{MODULE}.shared_experts")
    shared = DenseMLP(every * inner, read.activation(), names=names) if every else None
    return MoE(
        count,
        inner,
        sigmoid_router(read, count),
        experts_spec(read),
        EachExpert("w1", "w3", "w2"),
        shared=shared,
        module=MODULE,
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Layers without key/value heads are delta nets, with as many heads as the others."""
    if header.integer("expert_gating_func", 2) != 2:
        raise header.error("expert_gating_func", "must be 2, sigmoid")
    config = latent_config(header)
    return {
        **config,
        **experts_config(header),
        "layer_types": [KINDS[kv > 0] for kv in of_each_layer(header, KV_HEADS)],
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": header.integer("kda.head_dim"),
        "linear_conv_kernel_dim": header.integer("ssm.conv_kernel"),
        "n_shared_experts": header.integer("expert_shared_count", 0, low=0),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "norm_topk_prob": header.flag("expert_weights_norm", True),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
    }


_DELTA, _MOE = "model.layers.{}.self_attn", f"model.layers.{{}}.{MODULE}"
GGUF = GGUFArchitecture(
    "KimiLinearForCausalLM",
    {
        **LATENT_TENSORS,
        **{f"blk.{{}}.ssm_conv1d_{name}": f"{_DELTA}.{name}_conv1d" for name in "qkv"},
        **{
            f"blk.{{}}.ssm_{name}": f"{_DELTA}.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")
        },
        "blk.{}.ssm_beta": f"{_DELTA}.b_proj",
        "blk.{}.ssm_a": f"{_DELTA}.A_log",
        "blk.{}.ssm_dt.bias": f"{_DELTA}.dt_bias",
        "blk.{}.ssm_norm": f"{_DELTA}.o_norm",
        "blk.{}.ffn_gate_inp": f"{_MOE}.gate",
        "blk.{}.exp_probs_b.bias": f"{_MOE}.{CHOICE_BIAS}",
        "blk.{}.ffn_gate_exps": f"{_MOE}.experts.{{}}.w1",
        "blk.{}.ffn_up_exps": f"{_MOE}.experts.{{}}.w3",
        "blk.{}.ffn_down_exps": f"{_MOE}.experts.{{}}.w2",
        **{
            f"blk.{{}}.ffn_{name}_shexp": f"{_MOE}.shared_experts.{name}_proj"
            for name in ("gate", "up", "down")
        },
    },
    config=_gguf_config,
    decays=("blk.{}.ssm_a",),
)
