"""The conformance suite on the architectures with experts, and on those with latent attention."""

from __future__ import annotations

from typing import Any

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


class TestOlmoe(Served):
    config = SMALL | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
    }
    bad_configs = ({"clip_qkv": 8.0},)


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


class TestMixtral(Served):
    config = SMALL | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 22, "q_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 12,
    "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 16, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
BAD_LATENTS = (
    {"kv_lora_rank": None},
    {"qk_rope_head_dim": 7},
    {"num_key_value_heads": 2},
    {"moe_layer_freq": 2},
    {"mlp_layer_types": ["dense", "sparse"]},
    {"mlp_layer_types": "sparse"},
    {"layer_types": ["sliding_attention"] * 3},
    {"layer_types": 5},
    {"n_group": 5},
    {"n_group": 12},
    {"topk_group": 5},
    {"num_experts_per_tok": 7},
    {"scoring_func": "sqrtsoftplus"},
    {"topk_method": "random"},
)


class TestDeepSeekV2(Served):
    config = (
        SMALL
        | LATENT
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
        }
    )
    bad_configs = (*(one for one in BAD_LATENTS if "n_group" not in one), {"norm_topk_prob": True})


class TestDeepSeekV3(Served):
    config = (
        SMALL
        | LATENT
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
        }
    )
    bad_configs = BAD_LATENTS


class TestGlm4MoeLite(Served):
    config = (
        SMALL
        | LATENT
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "n_shared_experts": 2,
        }
    )


INDEXED: dict[str, Any] = {"index_topk": 192, "index_head_dim": 16, "index_n_heads": 2}
INDEXER = tuple(
    f"model.layers.{layer}.self_attn.indexer.{name}"
    for layer in range(3)
    for name in ("k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight")
)
"""What picks tokens where there are more of them than are served."""


class TestDeepSeekV32(Served):
    config = (
        SMALL
        | LATENT
        | INDEXED
        | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
        }
    )
    unused_tensors = INDEXER

    def test_is_served_up_to_the_tokens_that_the_indexer_picks(self) -> None:
        assert self.make_model(dict(self.config)).shape.max_model_len == 192


class TestGlmMoeDsa(Served):
    config = (
        SMALL
        | LATENT
        | INDEXED
        | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
        }
    )
    unused_tensors = INDEXER
