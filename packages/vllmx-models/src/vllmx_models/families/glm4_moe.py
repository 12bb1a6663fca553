"""GLM-4.5, 4.6 and 4.7, and GLM-4.5-Air (Glm4MoeForCausalLM): grouped-query attention over DeepSeek
V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    rms,
)
from vllmx_models.configs.moe import EXPERT_KEYS, sparse_layers, with_feed_forward
from vllmx_models.families.deepseek import (
    DEEPSEEK_EXPERTS,
    expert_states,
    shared_experts,
    sigmoid_router,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder

DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
"""The defaults of transformers for absent keys."""
HONOURED = ("attention_bias", "partial_rotary_factor", "use_qk_norm", *EXPERT_KEYS)


def glm4_moe(config: Mapping[str, Any]) -> Decoder:
    """RoPE rotates half of each head; the first layers have no experts."""
    read = ConfigReader({**DEFAULTS, **config}, "Glm4MoeForCausalLM")
    read.refuse_quirks(*HONOURED)
    mixer = attention_mixer(
        read,
        head_size(read),
        qkv_bias=read.flag("attention_bias", False),
        qk_norm=rms(read) if read.flag("use_qk_norm", False) else None,
    )
    sparse = sparse_layers(read)
    positions = read.integer("max_position_embeddings")
    sliding = [False] * len(sparse)
    ropes = layer_ropes(read, mixer.head_size, sliding, default_positions=positions)
    moe = shared_experts(read, sigmoid_router)
    layers = layer_specs(read, mixer, moe, ropes, sliding, None)
    dense = [number for number, has_experts in enumerate(sparse) if not has_experts]
    if dense:
        layers = with_feed_forward(layers, dense, dense_mlp(read))
    return Decoder(decoder_spec(read, layers, default_positions=positions))


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """The config.json of a GGUF header; its layer count includes multi-token prediction."""
    config = decoder_config(header, "expert_count", "nextn_predict_layers")
    config |= experts_config(header)
    if header.integer("expert_gating_func", 2) != 2:
        raise header.error("expert_gating_func", "must be 2, sigmoid")
    extra = header.integer("nextn_predict_layers", 0, low=0)
    config["num_hidden_layers"] = header.integer("block_count") - extra
    return config | {
        "num_nextn_predict_layers": extra,
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": header.integer("expert_shared_count", 0, low=0),
        "first_k_dense_replace": header.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "norm_topk_prob": header.flag("expert_weights_norm", True),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


_DECODER = {name: ours for name, ours in DECODER_TENSORS.items() if name != "blk.{}.ffn_norm"}
GGUF = GGUFArchitecture(
    "Glm4MoeForCausalLM",
    {
        **_DECODER,
        **HEAD_NORM_TENSORS,
        **DEEPSEEK_EXPERTS,
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    },
    config=_gguf_config,
    states=expert_states,
)
