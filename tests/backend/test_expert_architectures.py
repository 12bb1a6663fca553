"""The conformance suite on the architectures with experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from .served_models import EXPERTS, QWEN2_MOE, SMALL, Served


class TestQwen2Moe(Served):
    config = SMALL | QWEN2_MOE
    bad_configs = ({"num_experts_per_tok": 7}, {"mlp_only_layers": 3})


class TestQwen3Moe(Served):
    config = (
        SMALL
        | EXPERTS
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": 20,
            "norm_topk_prob": True,
        }
    )


class TestGptOss(Served):
    config = SMALL | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 9,
    }
    bad_configs = ({"hidden_act": "gelu"}, {"num_experts_per_tok": 6}, {"swiglu_limit": 0})


class TestPhimoe(Served):
    """Scores of experts are close to each other, so that several are near the best."""

    config = SMALL | {
        "architectures": ["PhimoeForCausalLM"],
        "model_type": "phimoe",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.4,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 200,
    }
    bad_configs = (
        {"router_jitter_noise": 0},
        {"num_experts_per_tok": 7},
        {"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.0, "long_mscale": 2.0}},
    )


class TestOlmoe(Served):
    config = SMALL | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
    }
    bad_configs = ({"clip_qkv": -8.0},)


class TestOlmoeClipped(Served):
    """The first OLMoE, where the clip reaches many of the numbers."""

    config = TestOlmoe.config | {"clip_qkv": 0.7}


class TestGlm4Moe(Served):
    config = SMALL | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 16,
        "n_group": 3,
        "topk_group": 2,
        "use_qk_norm": True,
    }
    bad_configs = ({"n_group": 4}, {"topk_group": 4}, {"num_experts_per_tok": 5})


class TestDots1(Served):
    config = SMALL | {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "head_dim": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    bad_configs = ({"n_group": 4}, {"num_experts_per_tok": 5})


SHARED_EXPERTS: dict[str, Any] = {
    **EXPERTS,
    "head_dim": 16,
    "num_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
}


class TestExaoneMoe(Served):
    config = (
        SMALL
        | SHARED_EXPERTS
        | {
            "architectures": ["ExaoneMoeForCausalLM"],
            "model_type": "exaone_moe",
            "sliding_window": 11,
            "num_hidden_layers": 4,
        }
    )
    bad_configs = ({"n_group": 4}, {"sliding_window_pattern": 0})


class TestHunyuan3(Served):
    config = (
        SMALL
        | SHARED_EXPERTS
        | {
            "architectures": ["HYV3ForCausalLM"],
            "model_type": "hy_v3",
            "n_group": 1,
            "topk_group": 1,
        }
    )
    bad_configs = ({"num_experts_per_tok": 7},)


class TestHunyuanMoe(Served):
    config = SMALL | {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "model_type": "hunyuan_v1_moe",
        "head_dim": 20,
        "num_experts": 5,
        "moe_topk": 2,
    }
    bad_configs = ({"moe_topk": 6}, {"moe_intermediate_size": [72, 71]}, {"num_shared_expert": 2})


class _Renamed:
    """GLM-4.5 of transformers, saved under the names of Ling 2, which transformers lacks."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._model(*args, **options)

    def save_pretrained(self, folder: str) -> None:
        from safetensors.numpy import load_file, save_file

        self._model.save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        tensors = load_file(path)
        for layer in range(self._model.config.num_hidden_layers):
            module = f"model.layers.{layer}.self_attn."
            parts = [tensors.pop(f"{module}{name}_proj.weight") for name in "qkv"]
            tensors[f"{module}query_key_value.weight"] = np.concatenate(parts)
        names = {
            "embed_tokens": "word_embeddings", "self_attn": "attention", "o_proj": "dense",
            "q_norm": "query_layernorm", "k_norm": "key_layernorm",
            "e_score_correction_bias": "expert_bias",
        }  # fmt: skip
        pattern = re.compile("|".join(names))
        save_file({pattern.sub(lambda m: names[m[0]], k): v for k, v in tensors.items()}, path)


class TestLing2(Served):
    config = (
        SMALL
        | SHARED_EXPERTS
        | {
            "architectures": ["BailingMoeV2ForCausalLM"],
            "model_type": "bailing_moe_v2",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        }
    )
    bad_configs = (
        {"score_function": "softmax"},
        {"moe_shared_expert_intermediate_size": 21},
        {"topk_group": 4},
    )

    def transformers_model(self) -> Any:
        renamed = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
        config = {renamed.get(key, key): value for key, value in self.config.items()}
        rope = {**SMALL["rope_parameters"], "partial_rotary_factor": 0.5}
        other = {"model_type": "glm4_moe", "use_qk_norm": True, "rope_parameters": rope}

        class Twin(Served):
            pass

        Twin.config = {**config, **other, "architectures": ["Glm4MoeForCausalLM"]}
        return _Renamed(Twin().transformers_model())


class TestErnieMoe(Served):
    config = SMALL | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "num_hidden_layers": 4,
        "moe_layer_end_index": 2,
    }
    bad_configs = ({"moe_k": 6}, {"use_bias": True})


class TestGraniteMoe(Served):
    config = SMALL | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.25,
    }


class TestMiniMaxM2(Served):
    config = SMALL | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    }
    bad_configs = ({"scoring_func": "softmax"}, {"rotary_dim": 17}, {"use_qk_norm": False})


ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334}


class TestMiMoV2Flash(Served):
    """Values of 12 numbers beside keys of 20; layers with a window have twice the kv heads."""

    config = SMALL | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "head_dim": 20,
        "v_head_dim": 12,
        "sliding_window": 11,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "moe_intermediate_size": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": ROTATED | {"rope_theta": 5e6},
            "sliding_attention": ROTATED,
        },
    }
    bad_configs = (
        {"v_head_dim": 21},
        {"swa_v_head_dim": 10},
        {"swa_num_key_value_heads": 3},
        {"attention_value_scale": 0},
        {"scoring_func": "softmax"},
    )


class TestMixtral(Served):
    config = SMALL | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }


class TestLlama4(Served):
    """Chunks end inside of pages and of steps."""

    config = SMALL | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 44,
        "head_dim": 20,
        "attention_chunk_size": 11,
        "floor_scale": 9,
        "attn_scale": 0.7,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    }
    bad_configs = (
        {"num_experts_per_tok": 2},
        {"attention_chunk_size": 0},
        {"layer_types": ["sliding_attention"] * 4},
        {"no_rope_layers": [1, 0]},
    )
