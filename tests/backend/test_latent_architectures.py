"""The conformance suite on the architectures with latent attention, with and without an indexer."""

from __future__ import annotations

from typing import Any

import pytest

from .served_models import SMALL, Served

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


class TestMistral4(Served):
    auto_class = "AutoModelForImageTextToText"
    config = (
        SMALL
        | LATENT
        | {
            "architectures": ["Mistral4ForCausalLM"],
            "model_type": "mistral4",
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        }
    )
    bad_configs = ({"n_group": 5}, {"topk_group": 5})


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


INDEXED: dict[str, Any] = {"index_topk": 11, "index_head_dim": 16, "index_n_heads": 32}
BAD_INDEXERS = (
    {"q_lora_rank": None},
    {"index_topk": 0},
    {"index_head_dim": 6},
    {"index_n_heads": "two"},
    {"indexer_types": ["shared", "full", "full"]},
    {"indexer_types": ["full", "full"]},
    {"index_topk_pattern": "FSX"},
    {"index_topk_freq": 0},
)


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
    bad_configs = BAD_INDEXERS

    def test_is_served_beyond_the_tokens_that_the_indexer_picks(self) -> None:
        shape = self.make_model(dict(self.config)).shape
        assert shape.max_model_len > self.config["index_topk"]


class TestGlmMoeDsa(Served):
    config = (
        SMALL
        | LATENT
        | INDEXED
        | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": 4,
            "index_topk_pattern": "FSFF",
        }
    )

    @pytest.mark.parametrize(
        ("keys", "own"),
        [
            ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSF"),
            ({"indexer_types": ["full", "shared"] * 4}, "FSFSFSF"),
            ({"index_topk_pattern": "FSSSSSSS", "index_topk_freq": 2}, "FSSSSSS"),
            ({}, "FFFFFFF"),
        ],
    )
    def test_layers_with_indexers(self, keys: dict[str, Any], own: str) -> None:
        """As GLM-5.2 states them; an indexer's keys are part of its layer's cache."""
        config = self.config | {"num_hidden_layers": 7, "index_topk_pattern": None} | keys
        caches = self.make_model(config).shape.caches
        assert [16 if one == "F" else 0 for one in own] == [one.value_size for one in caches]
