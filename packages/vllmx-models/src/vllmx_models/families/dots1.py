"""dots.llm1 (Dots1ForCausalLM): Qwen3's attention over DeepSeek V3's experts. So are Hunyuan 3
(HYV3ForCausalLM) and, with RoPE for half of each head, Ling and Ring 2 (BailingMoeV2ForCausalLM)
and GLM-4.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.moe import MoE
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
from vllmx_models.configs.moe import EXPERT_KEYS, with_dense_layers
from vllmx_models.families.deepseek import (
    DEEPSEEK_EXPERTS,
    expert_states,
    prediction,
    shared_experts,
    sigmoid_router,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    sigmoid_experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, ModelNames

DOTS1: Mapping[str, Any] = {
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "n_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
HY_V3: Mapping[str, Any] = {
    **DOTS1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "norm_topk_prob": True,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
    "router_scaling_factor": 2.826,
}
"""The defaults of transformers for absent keys."""
BAILING: Mapping[str, Any] = {
    **DOTS1,
    "max_position_embeddings": 32768,
    "norm_topk_prob": True,
    "num_shared_experts": 0,
    "partial_rotary_factor": 0.5,
}
RENAMED = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
    "score_function": "scoring_func",
}
"""Other names of keys, by DeepSeek's."""
BAILING_NAMES = AttentionNames(
    "attention", o="dense", qkv="query_key_value", q_norm="query_layernorm", k_norm="key_layernorm"
)


def dots1(config: Mapping[str, Any]) -> Decoder:
    """`layer_types` says which layers have a window."""
    read = ConfigReader({**DOTS1, **config}, "Dots1ForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types", "sliding_window", *EXPERT_KEYS)
    bias = read.flag("attention_bias", False)
    moe = shared_experts(read, sigmoid_router)
    return Decoder(sparse_decoder(read, moe, qkv_bias=bias, o_bias=bias, qk_norm=rms(read)))


def hy_v3(config: Mapping[str, Any]) -> Decoder:
    """The first layer has no experts."""
    read = ConfigReader(deepseek_keys({**HY_V3, **config}), "HYV3ForCausalLM")
    read.refuse_quirks("attention_bias", "qk_norm", *EXPERT_KEYS)
    if not read.flag("qk_norm", True):
        raise read.error("qk_norm", "is not known here: true")
    bias = read.flag("attention_bias", False)
    moe = _named(shared_experts(read, sigmoid_router), "router.gate", "expert_bias", "shared_mlp")
    return Decoder(sparse_decoder(read, moe, qkv_bias=bias, o_bias=bias, qk_norm=rms(read)))


def bailing_moe_v2(config: Mapping[str, Any]) -> Decoder:
    """Queries, keys and values are one matrix."""
    read = ConfigReader(deepseek_keys({**BAILING, **config}), "BailingMoeV2ForCausalLM")
    read.refuse_quirks("partial_rotary_factor", "use_qk_norm", *EXPERT_KEYS)
    moe = _named(shared_experts(read, sigmoid_router), "gate", "gate.expert_bias", "shared_experts")
    inner = moe.intermediate_size
    if read.integer("moe_shared_expert_intermediate_size", inner) != inner:
        raise read.error("moe_shared_expert_intermediate_size", "must be moe_intermediate_size")
    spec = sparse_decoder(
        read,
        moe,
        qkv_bias=read.flag("use_qkv_bias", False),
        o_bias=read.flag("use_bias", False),
        qk_norm=rms(read) if read.flag("use_qk_norm", True) else None,
        names=BAILING_NAMES,
    )
    names = ModelNames("model.word_embeddings")
    return Decoder(replace(spec, names=names, prediction=prediction(len(spec.layers))))


def sparse_decoder(read: ConfigReader, moe: MoE, **mixer: Any) -> DecoderSpec:
    """The first layers have no experts; one RoPE for all layers. `mixer` are `AttentionMixer`'s
    options."""
    positions, count = read.integer("max_position_embeddings"), num_layers(read)
    attention = attention_mixer(read, head_size(read), **mixer)
    sliding = sliding_layers(read, [False] * count)
    window = read.integer("sliding_window", 4096, high=1 << 31) if any(sliding) else None
    ropes = layer_ropes(read, attention.head_size, [False] * count, default_positions=positions)
    layers = layer_specs(read, attention, moe, ropes, sliding, window)
    return decoder_spec(read, with_dense_layers(read, layers), default_positions=positions)


def deepseek_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with DeepSeek's names of keys besides those of `RENAMED`."""
    return {**config, **{new: config[old] for old, new in RENAMED.items() if old in config}}


def _named(moe: MoE, router: str, bias: str, shared: str) -> MoE:
    """The experts by these names of the router, its bias and the shared expert."""
    own = moe.shared and replace(moe.shared, names=MLPNames(f"mlp.{shared}"))
    return replace(moe, shared=own, router=replace(moe.router, name=router, choice_bias=bias))


def _bailing_config(header: GGUFHeader) -> dict[str, Any]:
    config = sigmoid_experts_config(header)
    return config | {
        "num_shared_experts": config["n_shared_experts"],
        "use_qkv_bias": "blk.0.attn_qkv.bias" in header.tensors,
        "use_bias": "blk.0.attn_output.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "architectures": ["BailingMoeV2ForCausalLM"],
    }


GGUF = GGUFArchitecture(
    "Dots1ForCausalLM",
    {**DECODER_TENSORS, **HEAD_NORM_TENSORS, **DEEPSEEK_EXPERTS},
    config=sigmoid_experts_config,
    states=expert_states,
)
_LAYER = "model.layers.{}"
_SPLIT = ("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v")
BAILING_GGUF = GGUFArchitecture(
    "BailingMoeV2ForCausalLM",
    {
        **{name: ours for name, ours in DECODER_TENSORS.items() if name not in _SPLIT},
        **DEEPSEEK_EXPERTS,
        "token_embd": "model.word_embeddings",
        "blk.{}.attn_qkv": f"{_LAYER}.attention.query_key_value",
        "blk.{}.attn_output": f"{_LAYER}.attention.dense",
        "blk.{}.attn_q_norm": f"{_LAYER}.attention.query_layernorm",
        "blk.{}.attn_k_norm": f"{_LAYER}.attention.key_layernorm",
        "blk.{}.exp_probs_b.bias": f"{_LAYER}.mlp.gate.expert_bias",
    },
    config=_bailing_config,
    states=expert_states,
)
