"""Tiny hybrids of recurrent layers and attention, with the writers of their GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter
from vllmx_core.plugins.registry import Registry
from vllmx_testing.model_suite import random_weights

from .hybrid_writers import (
    EXPERTS,
    HEADS,
    LAYERS,
    SMALL,
    Arrays,
    Family,
    falcon_h1,
    falcon_h1_header,
    granite,
    granite_header,
    kimi_linear,
    kimi_linear_header,
    lfm2,
    lfm_header,
    mamba1,
    mamba1_header,
    mamba2,
    mamba2_header,
    nemotron,
    nemotron_header,
    qwen3_next,
    qwen3_next_of_old,
    qwen_header,
)


def config_of(architecture: str, **keys: Any) -> dict[str, Any]:
    return {**SMALL, "architectures": [architecture], **keys}


_QWEN = EXPERTS | {
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
_CONVS = {
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
}
TIED = {**_CONVS, "tie_word_embeddings": True}
_GRANITE = {
    "layer_types": ["mamba", "attention"] * 2,
    "shared_intermediate_size": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "position_embedding_type": "nope",
}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": "M-*M",
}
_GRANITE_MOE = _GRANITE | EXPERTS | {"intermediate_size": 32}
_GRANITE_DENSE = _GRANITE | {
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "intermediate_size": 32,
}
_NEMOTRON_MOE = _NEMOTRON | {
    "hybrid_override_pattern": "ME*E",
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
    "routed_scaling_factor": 2.5,
}


_JAMBA = EXPERTS | {
    "attn_layer_period": 4,
    "attn_layer_offset": 1,
    "mamba_d_state": 12,
    "mamba_dt_rank": 32,
}
_FALCON_H1 = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    # powers of two, by which blocks are multiplied exactly
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.5],
    "mlp_multipliers": [0.5, 2.0],
    "key_multiplier": 0.25,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 2.0,
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.125,
}
_KIMI_LINEAR = EXPERTS | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": HEADS,
    "linear_num_heads": HEADS,
    "linear_head_dim": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "routed_scaling_factor": 2.5,
}
_MAMBA = {
    "state_size": 12,
    "time_step_rank": 32,
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-5,
    "intermediate_size": 128,
}


def family_of(arch: str, tensors: Any, header: Any, architecture: str, config: Any) -> Family:
    return Family(MODEL_ARCH[arch], config_of(architecture, **config), tensors, header)


def with_prediction(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    qwen_header(writer, config)
    writer.add_block_count(LAYERS + 1)
    writer.add_nextn_predict_layers(1)


def predicting(arrays: Arrays, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """A layer of multi-token prediction behind the others."""
    yield from qwen3_next(arrays, config)
    yield f"blk.{LAYERS}.nextn.eh_proj.weight", np.ones((4, 8))
    yield f"blk.{LAYERS}.attn_norm.weight", np.ones(8)


_NEXT, _HYBRID, _H = "Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"
FAMILIES = {
    "qwen3next": family_of("QWEN3NEXT", qwen3_next, qwen_header, _NEXT, _QWEN),
    "qwen3next of old": family_of("QWEN3NEXT", qwen3_next_of_old, qwen_header, _NEXT, _QWEN),
    "qwen3next, predicting": family_of("QWEN3NEXT", predicting, with_prediction, _NEXT, _QWEN),
    "lfm2": family_of("LFM2", lfm2, lfm_header, "Lfm2ForCausalLM", _CONVS | {"conv_bias": True}),
    "lfm2moe": family_of(
        "LFM2MOE", lfm2, lfm_header, "Lfm2MoeForCausalLM", EXPERTS | TIED | {"num_dense_layers": 1}
    ),
    "granitehybrid": family_of("GRANITE_HYBRID", granite, granite_header, _HYBRID, _GRANITE_MOE),
    "granitehybrid, dense, rope": family_of(
        "GRANITE_HYBRID", granite, granite_header, _HYBRID, _GRANITE_DENSE
    ),
    "nemotron_h": family_of("NEMOTRON_H", nemotron, nemotron_header, _H, _NEMOTRON),
    "falcon-h1": family_of(
        "FALCON_H1", falcon_h1, falcon_h1_header, "FalconH1ForCausalLM", _FALCON_H1
    ),
    "falcon-h1, no norm": family_of(
        "FALCON_H1",
        falcon_h1,
        falcon_h1_header,
        "FalconH1ForCausalLM",
        _FALCON_H1 | {"mamba_rms_norm": False},
    ),
    "kimi-linear": family_of(
        "KIMI_LINEAR", kimi_linear, kimi_linear_header, "KimiLinearForCausalLM", _KIMI_LINEAR
    ),
    "jamba": family_of("JAMBA", mamba1, mamba1_header, "JambaForCausalLM", _JAMBA),
    "mamba": family_of("MAMBA", mamba1, mamba1_header, "MambaForCausalLM", _MAMBA),
    "mamba2": family_of(
        "MAMBA2",
        mamba2,
        mamba2_header,
        "Mamba2ForCausalLM",
        {
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 12,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "falcon-mamba": family_of("MAMBA", mamba1, mamba1_header, "FalconMambaForCausalLM", _MAMBA),
    "nemotron_h_moe": family_of("NEMOTRON_H_MOE", nemotron, nemotron_header, _H, _NEMOTRON_MOE),
}


def weights(registry: Registry, family: Family) -> tuple[Any, Arrays]:
    config = dict(family.config)
    model = registry.model_for(config).load()(config)
    source = random_weights(model)
    return model, {name: source.part(name).dequantize() for name in source.names()}
