"""Tiny models of the families with experts, and the names that publishers of quantised checkpoints
give to the matrices inside of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllmx_core.plan import F32
from vllmx_core.plugins.registry import load_registry
from vllmx_testing.model_suite import random_weights

REGISTRY = load_registry()
COUNT, INNER, HIDDEN = 3, 96, 256
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "rope_theta": 1e4, "torch_dtype": "float32",
    "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = ROUTED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": None,
}

Views = Iterator[tuple[str, F32]]
"""Names of matrices as quantised checkpoints have them, and views of where they lie in the
original's arrays."""


def as_they_are(name: str, array: F32) -> Views:
    yield name, array


def gate_and_up(name: str, array: F32) -> Views:
    """Gemma 4: (X, 2F, E), and (X, E, F)."""
    for expert, matrix in enumerate(array):
        if name.endswith(".gate_up_proj"):
            yield _of_expert(name, expert, "gate_proj"), matrix[:INNER]
            yield _of_expert(name, expert, "up_proj"), matrix[INNER:]
        else:
            yield _of_expert(name, expert, "down_proj"), matrix


def halves(name: str, array: F32) -> Views:
    """Llama 4: (X, E, 2F), the columns of gate first, and (X, F, E)."""
    for expert, values in enumerate(array):
        rows = values.T
        if name.endswith(".gate_up_proj"):
            yield _of_expert(name, expert, "gate_proj"), rows[:INNER]
            yield _of_expert(name, expert, "up_proj"), rows[INNER:]
        else:
            yield _of_expert(name, expert, "down_proj"), rows


def turns(name: str, array: F32) -> Views:
    """gpt-oss: (X, E, 2F) whose columns are of gate and up in turns, (X, F, E), and biases."""
    for expert, values in enumerate(array):
        kind = "bias" if name.endswith("_bias") else "weight"
        rows = values.T
        if ".gate_up_proj" in name:
            yield _of_expert(name, expert, "gate_proj", kind), rows[::2]
            yield _of_expert(name, expert, "up_proj", kind), rows[1::2]
        else:
            yield _of_expert(name, expert, "down_proj", kind), rows


def _of_expert(name: str, expert: int, matrix: str, kind: str = "weight") -> str:
    return f"{name.rpartition('.')[0]}.{expert}.{matrix}.{kind}"


def in_a_list(name: str, array: F32) -> Views:
    """Granite: two matrices for each expert."""
    for expert, matrix in enumerate(array):
        yield f"{name.removesuffix('.weight')}.{expert}.weight", matrix


@dataclass(frozen=True)
class Family:
    config: dict[str, Any]
    experts: Callable[[str, F32], Views] = as_they_are
    """Of a tensor with the experts of a layer, where they are one tensor."""
    dense: str = r"lm_head|embed|norm|(^|\.)(gate|router.*|shared_expert_gate|b_proj)$|conv|_[ab]$"
    """The modules that no publisher quantises."""

    def views(self, arrays: Mapping[str, F32]) -> Views:
        """All tensors of the checkpoint as a quantised one has them."""
        for name, array in arrays.items():
            inside = re.search(r"\.experts\.\w+$|moe\.\w+put_linear\.weight$", name)
            yield from (self.experts if inside else as_they_are)(name, array)

    def is_quantised(self, name: str, array: F32) -> bool:
        module = name.removesuffix(".weight")
        return module != name and array.ndim == 2 and re.search(self.dense, module) is None


def _family(model_type: str, architecture: str, *changes: Mapping[str, Any], **more: Any) -> Family:
    config = SMALL | {"model_type": model_type, "architectures": [f"{architecture}ForCausalLM"]}
    for change in changes:
        config |= change
    return Family({key: value for key, value in config.items() if value is not None}, **more)


DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 128,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32,
    "mamba_expand": 1,
}  # fmt: skip
INDEX = {"index_topk": 128, "index_head_dim": 128, "index_n_heads": 8}
LOCAL, EXPERTS = {"num_local_experts": COUNT}, {"num_experts": COUNT}
FAMILIES = {
    "qwen2-moe": _family(
        "qwen2_moe", "Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 128}
    ),
    "qwen3-moe": _family("qwen3_moe", "Qwen3Moe", EXPERTS),
    "mixtral": _family("mixtral", "Mixtral", LOCAL),
    "olmoe": _family("olmoe", "Olmoe", EXPERTS),
    "gpt-oss": _family("gpt_oss", "GptOss", LOCAL | {"sliding_window": 16}, experts=turns),
    "glm4-moe": _family("glm4_moe", "Glm4Moe", ROUTED | {"use_qk_norm": True}),
    "deepseek-v2": _family(
        "deepseek_v2", "DeepseekV2",
        LATENT | {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": _family("deepseek_v3", "DeepseekV3", LATENT | {"n_group": 2, "topk_group": 1}),
    "mistral4": _family("mistral4", "Mistral4", LATENT),
    "dots1": _family("dots1", "Dots1", ROUTED),
    "ernie4.5-moe": _family("ernie4_5_moe", "Ernie4_5_Moe", {"moe_num_experts": COUNT, "moe_k": 2}),
    "exaone-moe": _family("exaone_moe", "ExaoneMoe", EXPERTS | {"sliding_window": 16}),
    "hunyuan-moe": _family(
        "hunyuan_v1_moe", "HunYuanMoEV1", EXPERTS | {"moe_topk": 2},
        dense=r"lm_head|embed|norm|[.]wg$",
    ),
    "hunyuan3": _family("hy_v3", "HYV3", EXPERTS),
    "phi-moe": _family("phimoe", "Phimoe", LOCAL | {"router_jitter_noise": 0.3}),
    "jamba": _family(
        "jamba", "Jamba",
        EXPERTS | {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
            "expert_layer_offset": 0, "mamba_d_state": 32, "mamba_dt_rank": 32, "mamba_expand": 1,
        },
        dense=r"lm_head|embed|norm|router$|conv|x_proj|dt_proj",
    ),
    "ling2": _family("bailing_moe_v2", "BailingMoeV2", EXPERTS),
    "llama4": _family(
        "llama4_text", "Llama4",
        LOCAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 128}, experts=halves,
    ),
    "glm-4.7-flash": _family("glm4_moe_lite", "Glm4MoeLite", LATENT),
    "granite-moe": _family(
        "granitemoe", "GraniteMoe", LOCAL | {"attention_multiplier": 0.2}, experts=in_a_list
    ),
    "mimo-v2-flash": _family(
        "mimo_v2_flash", "MiMoV2Flash",
        {"n_routed_experts": COUNT, "v_head_dim": 16, "sliding_window": 16},
        dense=r"lm_head|embed|norm|(^|\.)gate$",
    ),
    "minimax-m2": _family("minimax_m2", "MiniMaxM2", LOCAL | {"rotary_dim": 16}),
    "qwen3.5-moe": _family("qwen3_5_moe_text", "Qwen3_5Moe", EXPERTS | DELTA),
    "qwen3-next": _family("qwen3_next", "Qwen3Next", EXPERTS | DELTA),
    "deepseek-v3.2": _family(
        "deepseek_v32", "DeepseekV32", LATENT | INDEX | {"n_group": 2, "topk_group": 1}
    ),
    "glm-5": _family("glm_moe_dsa", "GlmMoeDsa", LATENT | INDEX),
    "lfm2-moe": _family(
        "lfm2_moe", "Lfm2Moe",
        EXPERTS | {
            "layer_types": ["conv", "full_attention"], "num_dense_layers": 0, "norm_eps": 1e-5,
            "conv_L_cache": 3, "rms_norm_eps": None, "head_dim": None,
        },
    ),
    "granite-hybrid": _family(
        "granitemoehybrid", "GraniteMoeHybrid",
        LOCAL | MAMBA | {
            "layer_types": ["mamba", "attention"], "attention_multiplier": 0.2,
            "shared_intermediate_size": 128,
        },
        experts=in_a_list,
    ),
    "nemotron-h": _family(
        "nemotron_h", "NemotronH",
        {
            "hybrid_override_pattern": "M*E", "num_hidden_layers": 3, "mamba_num_heads": 8,
            "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1, "n_routed_experts": COUNT,
            "moe_shared_expert_intermediate_size": 128, "moe_latent_size": 64,
            "layer_norm_epsilon": 1e-5, "rms_norm_eps": None,
        },
    ),
    "kimi-linear": _family(
        "kimi_linear", "KimiLinear",
        LATENT | EXPERTS | {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4,
            "linear_head_dim": 32, "q_lora_rank": None,
        },
    ),
    "gemma4-moe": _family(
        "gemma4_text", "Gemma4",
        EXPERTS | {
            "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 64,
            "sliding_window": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "tie_word_embeddings": True, "enable_moe_block": True, "top_k_experts": 2,
            "num_experts_per_tok": None, "attention_k_eq_v": True, "rope_theta": None,
            "num_global_key_value_heads": 1,
        },
        experts=gate_and_up,
    ),
}  # fmt: skip


@cache
def original(family: str) -> dict[str, F32]:
    """The tensors of the original with random weights; nobody writes into them."""
    config = FAMILIES[family].config
    source = random_weights(REGISTRY.model_for(config).load()(config))
    return {name: source.part(name).dequantize() for name in source.names()}
