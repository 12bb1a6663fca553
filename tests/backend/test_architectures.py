"""The conformance suite on the architectures whose layers are attention and dense MLPs, and on
Gemma 4, and whether every architecture has its suite."""

from __future__ import annotations

import sys

from vllmx_core.plugins.specs import ModelSpec

from . import (
    test_compressed_architectures,
    test_expert_architectures,
    test_latent_architectures,
    test_recurrent_architectures,
)
from .served_models import REGISTRY, SMALL, Served, suites

BY_LAYER_TYPE = {key: value for key, value in SMALL.items() if key != "rope_parameters"}


class TestLlama(Served):
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


class TestMistral(Served):
    config = SMALL | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 11,
    }


GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
"""Queries that grow each 16 positions."""


class TestMinistral3(Served):
    config = BY_LAYER_TYPE | {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "head_dim": 20,
        "sliding_window": 11,
        "rope_parameters": GROWING,
    }
    bad_configs = ({"rope_parameters": GROWING | {"llama_4_scaling_beta": -1}},)


class TestQwen2(Served):
    config = SMALL | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 1,
    }


class TestQwen3(Served):
    config = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 20}


class TestSmolLM3(Served):
    config = SMALL | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 5,
    }


class TestGemma(Served):
    config = SMALL | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 20}


class TestGemma2(Served):
    config = SMALL | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 20,
        "query_pre_attn_scalar": 30,
        "sliding_window": 11,
    }
    bad_configs = ({"sliding_window": 0}, {"use_bidirectional_attention": True})


class TestGemma3(Served):
    config = BY_LAYER_TYPE | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 20,
        "query_pre_attn_scalar": 30,
        "sliding_window": 11,
        "sliding_window_pattern": 3,
    }
    bad_configs = ({"layer_types": ["chunked_attention"] * 3}, {"query_pre_attn_scalar": -1})


class TestGemma3n(Served):
    """Ids beyond the per-layer table, and layers of all kinds that share pages."""

    config = BY_LAYER_TYPE | {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "head_dim": 20,
        "sliding_window": 11,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [72, 60, 72, 72],
        "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 50,
        "laurel_rank": 6,
        "altup_num_inputs": 3,
    }
    bad_configs = (
        {"num_kv_shared_layers": 3},
        {"altup_active_idx": 1},
        {"activation_sparsity_pattern": [1.0] * 4},
        {"activation_sparsity_pattern": 0.5},
        {"intermediate_size": [72]},
    )


GEMMA4 = BY_LAYER_TYPE | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 11,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 61,
}


class TestGemma4Shared(Served):
    """The form of E2B and E4B: per-layer embeddings, and layers that read the pages of earlier
    ones."""

    config = GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    bad_configs = (
        {"num_kv_shared_layers": 3},
        {"use_bidirectional_attention": "all"},
        {"per_layer_config": {"1": {"sliding_window": 3}}},
        {"top_k_experts": 2, "num_experts": 2, "enable_moe_block": True},
    )


class TestGemma4Experts(Served):
    """The form of 26B-A4B: experts beside the MLP, values that are the keys."""

    config = GEMMA4 | {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_global_key_value_heads": 1,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "final_logit_softcapping": 20.0,
    }
    bad_configs = ({"top_k_experts": 6},)


class TestSeedOss(Served):
    config = SMALL | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "head_dim": 20,
        "attention_out_bias": True,
    }


class TestErnie(Served):
    config = SMALL | {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "head_dim": 20,
        "use_bias": True,
    }


class TestExaone4(Served):
    config = SMALL | {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "head_dim": 20,
        "sliding_window": 11,
        "num_hidden_layers": 4,
    }
    bad_configs = ({"sliding_window_pattern": "LX"}, {"sliding_window": 0})


class TestStarcoder2(Served):
    config = SMALL | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "sliding_window": 11,
        "norm_epsilon": 1e-5,
    }


class TestHunyuan(Served):
    config = BY_LAYER_TYPE | {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        "head_dim": 20,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "alpha": 100.0,
        },
    }
    bad_configs = ({"use_qk_norm": False},)


class TestHelium(Served):
    config = SMALL | {
        "architectures": ["HeliumForCausalLM"],
        "model_type": "helium",
        "head_dim": 12,
    }


class TestCwm(Served):
    config = SMALL | {
        "architectures": ["CwmForCausalLM"],
        "model_type": "cwm",
        "head_dim": 12,
        "bos_token_id": 1,
        "sliding_window": 11,
    }


class TestOlmo2(Served):
    config = SMALL | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


class TestOlmo3(Served):
    config = BY_LAYER_TYPE | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": 11,
        "num_hidden_layers": 4,
    }


class TestPhi3(Served):
    config = SMALL | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}


class TestGlm4(Served):
    config = SMALL | {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "head_dim": 20,
        "rope_parameters": {**SMALL["rope_parameters"], "partial_rotary_factor": 0.5},
    }


class TestGranite(Served):
    config = SMALL | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    }


class TestCohere(Served):
    config = SMALL | {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "use_qk_norm": True,
    }
    bad_configs = ({"clip_qkv": 5.0},)


class TestCohere2(Served):
    config = SMALL | {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "sliding_window": 11,
        "num_hidden_layers": 4,
    }


class TestStableLm(Served):
    config = SMALL | {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "qk_layernorm": True,
        "rope_parameters": {**SMALL["rope_parameters"], "partial_rotary_factor": 0.5},
    }


EQUAL_HEADS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
GPT2 = {
    **{key: SMALL[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 256,
}
"""GPT-2's names of keys."""


class TestGPT2(Served):
    config = GPT2 | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "scale_attn_by_inverse_layer_idx": True,
    }
    bad_configs = ({"add_cross_attention": True}, {"activation_function": "tanh"})


class TestGPTNeo(Served):
    config = EQUAL_HEADS | {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "num_heads": 4,
        "num_layers": 3,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "attention_layers": ["global", "local", "local"],
        "window_size": 11,
    }
    bad_configs = ({"attention_layers": ["global"] * 2}, {"attention_layers": None})


class TestOPT(Served):
    config = EQUAL_HEADS | {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": 72,
        "word_embed_proj_dim": 48,
        "pad_token_id": 1,
    }
    bad_configs = ({"do_layer_norm_before": False}, {"word_embed_proj_dim": 24})


class TestGPTNeoX(Served):
    config = EQUAL_HEADS | {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "rope_parameters": {**SMALL["rope_parameters"], "partial_rotary_factor": 0.5},
    }


class TestGPTNeoXSequential(Served):
    config = TestGPTNeoX.config | {"use_parallel_residual": False, "attention_bias": False}


class TestGPTJ(Served):
    config = GPT2 | {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "rotary_dim": 6}
    bad_configs = ({"rotary_dim": 5}, {"rotary_dim": 13})


class TestFalcon(Served):
    """The form of the 7B."""

    config = {key: value for key, value in EQUAL_HEADS.items() if key != "intermediate_size"} | {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
    }
    bad_configs = ({"alibi": True},)


class TestFalconNew(Served):
    """The form of the 40B."""

    config = TestFalcon.config | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}


class TestFalcon11B(Served):
    config = TestFalconNew.config | {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80}


class TestFalconSequential(Served):
    config = TestFalcon.config | {"parallel_attn": False, "multi_query": False, "bias": True}


def recorded(kind: str) -> set[str]:
    """The architectures that `vllmx models` says this was checked of."""
    specs = [spec for spec in REGISTRY.all(ModelSpec) if kind in spec.checked]
    return {name for spec in specs for name in spec.architectures}


def test_no_architecture_is_missing() -> None:
    here = sys.modules[__name__]
    others = (
        test_compressed_architectures,
        test_expert_architectures,
        test_latent_architectures,
        test_recurrent_architectures,
    )
    tested = suites(here, *others)
    assert {suite.config["architectures"][0] for suite in tested.values()} == recorded("logits")
