"""The conformance suite on every architecture that is served: all backends that can run here."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.model import Model
from vllmx_core.recording import prepare
from vllmx_core.registry import Registry, load_registry
from vllmx_core.specs import BackendSpec, ModelSpec
from vllmx_core.testing.model_suite import ModelSuite

REGISTRY: Registry = load_registry()
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def recorded(kind: str) -> set[str]:
    """The architectures that `vllmx models` says this was checked of."""
    specs = [spec for spec in REGISTRY.all(ModelSpec) if kind in spec.checked]
    return {name for spec in specs for name in spec.architectures}


class _Served(ModelSuite):
    def make_model(self, config: dict[str, Any]) -> Model:
        model: Model = REGISTRY.model_for(config).load()(config)
        return model

    def test_the_record_has_the_backends_with_its_ops(self) -> None:
        model, found = self.make_model(dict(self.config)), set[str]()
        for spec in REGISTRY.all(BackendSpec):
            backend = spec.load()()
            with suppress(UnsupportedOpError):
                prepare(model, 64, spec.name, backend.supports)
                found.add(spec.name)
        assert found == set(REGISTRY.model_for(self.config).backends)

    def transformers_model(self) -> Any:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        given = deepcopy(self.config)  # transformers writes into the dictionaries that it is given
        config = transformers.AutoConfig.for_model(**given, attn_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():  # biases start at zero, which would hide them
            torch.nn.init.normal_(parameter, std=0.2)
        for name, buffer in model.named_buffers():  # a part of the checkpoint, starts at one
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
        return model


class TestLlama(_Served):
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


class TestMistral(_Served):
    config = SMALL | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 11,
    }


class TestQwen2(_Served):
    config = SMALL | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 1,
    }


class TestQwen3(_Served):
    config = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 20}


EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


class TestQwen2Moe(_Served):
    config = (
        SMALL
        | EXPERTS
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
        }
    )
    bad_configs = ({"num_experts_per_tok": 7}, {"mlp_only_layers": 3})


class TestQwen3Moe(_Served):
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


class TestGptOss(_Served):
    config = SMALL | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 9,
    }
    bad_configs = ({"hidden_act": "gelu"}, {"num_experts_per_tok": 6}, {"swiglu_limit": 0})


class TestOlmoe(_Served):
    config = SMALL | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
    }
    bad_configs = ({"clip_qkv": 8.0},)


class TestGlm4Moe(_Served):
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


class TestGraniteMoe(_Served):
    config = SMALL | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.25,
    }


class TestMiniMaxM2(_Served):
    config = SMALL | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    }
    bad_configs = ({"scoring_func": "softmax"}, {"rotary_dim": 17}, {"use_qk_norm": False})


class TestMixtral(_Served):
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


class TestDeepSeekV2(_Served):
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


class TestDeepSeekV3(_Served):
    config = (
        SMALL
        | LATENT
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
        }
    )
    bad_configs = BAD_LATENTS


class TestGlm4MoeLite(_Served):
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


class TestDeepSeekV32(_Served):
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


class TestGlmMoeDsa(_Served):
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


class TestSmolLM3(_Served):
    config = SMALL | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 5,
    }


class TestGemma(_Served):
    config = SMALL | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 20}


class TestGemma2(_Served):
    config = SMALL | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 20,
        "query_pre_attn_scalar": 30,
        "sliding_window": 11,
    }
    bad_configs = ({"sliding_window": 0}, {"use_bidirectional_attention": True})


BY_LAYER_TYPE = {key: value for key, value in SMALL.items() if key != "rope_parameters"}


class TestGemma3(_Served):
    config = BY_LAYER_TYPE | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 20,
        "query_pre_attn_scalar": 30,
        "sliding_window": 11,
        "sliding_window_pattern": 3,
    }
    bad_configs = ({"layer_types": ["chunked_attention"] * 3}, {"query_pre_attn_scalar": -1})


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


class TestGemma4Shared(_Served):
    """The form of E2B and E4B: per-layer embeddings, and layers that read the pages of earlier
    ones."""

    config = GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    bad_configs = (
        {"num_kv_shared_layers": 3},
        {"use_bidirectional_attention": "all"},
        {"per_layer_config": {"1": {"sliding_window": 3}}},
        {"top_k_experts": 2, "num_experts": 2, "enable_moe_block": True},
    )


class TestGemma4Experts(_Served):
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


class TestSeedOss(_Served):
    config = SMALL | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "head_dim": 20,
        "attention_out_bias": True,
    }


class TestErnie(_Served):
    config = SMALL | {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "head_dim": 20,
        "use_bias": True,
    }


class TestHelium(_Served):
    config = SMALL | {
        "architectures": ["HeliumForCausalLM"],
        "model_type": "helium",
        "head_dim": 12,
    }


class TestCwm(_Served):
    config = SMALL | {
        "architectures": ["CwmForCausalLM"],
        "model_type": "cwm",
        "head_dim": 12,
        "bos_token_id": 1,
        "sliding_window": 11,
    }


class TestOlmo2(_Served):
    config = SMALL | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


class TestOlmo3(_Served):
    config = BY_LAYER_TYPE | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": 11,
        "num_hidden_layers": 4,
    }


class TestPhi3(_Served):
    config = SMALL | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}


class TestGlm4(_Served):
    config = SMALL | {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "head_dim": 20,
        "rope_parameters": {**SMALL["rope_parameters"], "partial_rotary_factor": 0.5},
    }


class TestGranite(_Served):
    config = SMALL | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    }


class TestCohere(_Served):
    config = SMALL | {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "use_qk_norm": True,
    }
    bad_configs = ({"clip_qkv": 5.0},)


class TestCohere2(_Served):
    config = SMALL | {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "sliding_window": 11,
        "num_hidden_layers": 4,
    }


class TestStableLm(_Served):
    config = SMALL | {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "qk_layernorm": True,
        "rope_parameters": {**SMALL["rope_parameters"], "partial_rotary_factor": 0.5},
    }


RECURRENT = {
    f"{family}ForCausalLM"
    for family in (
        "Bamba",
        "GraniteMoeHybrid",
        "KimiLinear",
        "Lfm2",
        "Lfm2Moe",
        "NemotronH",
        "Qwen3Next",
        "Qwen3_5",
        "Qwen3_5Moe",
    )
}
"""test_recurrent_architectures.py."""


def test_no_architecture_is_missing() -> None:
    suites = [suite for suite in _Served.__subclasses__() if hasattr(suite, "config")]
    tested = {suite.config["architectures"][0] for suite in suites} - RECURRENT
    assert tested == recorded("logits") - RECURRENT
