"""GLM-4.5, 4.6 and 4.7, and GLM-4.5-Air (Glm4MoeForCausalLM): grouped-query attention over DeepSeek
V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import rms
from vllmx_models.configs.moe import EXPERT_KEYS
from vllmx_models.families.deepseek import (
    DEEPSEEK_EXPERTS,
    expert_states,
    prediction,
    shared_experts,
    sigmoid_router,
)
from vllmx_models.families.dots1 import sparse_decoder
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    sigmoid_experts_config,
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
    spec = sparse_decoder(
        read,
        shared_experts(read, sigmoid_router),
        qkv_bias=read.flag("attention_bias", False),
        qk_norm=rms(read) if read.flag("use_qk_norm", False) else None,
    )
    return Decoder(replace(spec, prediction=prediction(len(spec.layers))))


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    return sigmoid_experts_config(header, renormalised=True) | {
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
