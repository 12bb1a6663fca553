"""The conformance suite on the architectures with recurrent layers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from vllmx_core.backend import LoadOptions
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import load_registry
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource

from .served_models import EXPERTS, SMALL, Served

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
GATED = EXPERTS | {"shared_expert_intermediate_size": 28}


class _Recurrent(Served):
    def transformers_model(self) -> Any:
        model = super().transformers_model()
        random = np.random.default_rng(0)
        for name, buffer in model.named_buffers():  # a part of the checkpoint, starts at zero
            if name.endswith("bias"):
                buffer.copy_(buffer.new_tensor(0.3 * random.standard_normal(buffer.shape)))
        return model


class TestQwen3Next(_Recurrent):
    config = (
        SMALL
        | DELTA
        | GATED
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "partial_rotary_factor": 0.5,
            "mlp_only_layers": [1],
        }
    )
    bad_configs = (
        {"linear_num_key_heads": 4},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"]},
        {"linear_conv_kernel_dim": 1},
    )


class TestQwen35(_Recurrent):
    config = (
        SMALL
        | DELTA
        | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        }
    )
    bad_configs = ({"attn_output_gate": False},)


class TestQwen35Moe(_Recurrent):
    config = (
        SMALL
        | DELTA
        | GATED
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "layer_types": ["linear_attention", "full_attention"] * 2,
        }
    )


CONVS = ["conv", "full_attention", "conv", "conv"]


class TestLfm2(_Recurrent):
    config = SMALL | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": CONVS,
        "conv_bias": True,
        "block_multiple_of": 8,
        "norm_eps": 1e-5,
    }
    bad_configs = ({"conv_L_cache": 1}, {"layer_types": ["conv"]}, {"block_ffn_dim_multiplier": 0})


class TestLfm2Moe(_Recurrent):
    config = (
        SMALL
        | EXPERTS
        | {
            "architectures": ["Lfm2MoeForCausalLM"],
            "model_type": "lfm2_moe",
            "num_hidden_layers": 4,
            "layer_types": CONVS,
            "num_dense_layers": 1,
            "norm_eps": 1e-5,
            "routed_scaling_factor": 1.5,
        }
    )


class TestNemotronH(_Recurrent):
    config = SMALL | {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-*EM", "head_dim": 16, "mamba_num_heads": 6,
        "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 2, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 20, "moe_latent_size": 24,
        "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5, "time_step_min": 0.4,
    }  # fmt: skip
    bad_configs = (
        {"n_groups": 4},
        {"hybrid_override_pattern": "MX"},
        {"mlp_hidden_act": "silu"},
        {"hybrid_override_pattern": ""},
        {"mamba_hidden_act": "gelu"},
    )


class TestGraniteMoeHybrid(_Recurrent):
    config = SMALL | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
        "num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "shared_intermediate_size": 28, "mamba_n_heads": 6, "mamba_d_head": 16,
        "mamba_n_groups": 2, "mamba_d_state": 12, "embedding_multiplier": 2.0,
        "logits_scaling": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5,
    }  # fmt: skip
    bad_configs = (
        {"mamba_n_heads": 7},
        {"mamba_n_groups": 4},
        {"time_step_limit": [1]},
        {"layer_types": ["mamba2"] * 4},
    )


class TestBamba(_Recurrent):
    config = SMALL | {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
    }
    bad_configs = ({"attn_layer_indices": [4]}, {"mamba_n_heads": 7}, {"mamba_n_groups": 4})


class TestFalconH1(_Recurrent):
    config = SMALL | {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1",
        "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2,
        "mamba_d_state": 12, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.7, 1.3, 0.6, 1.7, 0.9], "mlp_multipliers": [0.6, 1.4],
        "key_multiplier": 0.4, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.5, "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.3,
    }  # fmt: skip
    bad_configs = (
        {"ssm_multipliers": [1.0]},
        {"mlp_multipliers": [0, 1]},
        {"projectors_bias": True},
        {"mamba_n_heads": 7},
    )


class TestFalconH1WithoutNorm(_Recurrent):
    """The form of the smaller models."""

    config = TestFalconH1.config | {"mamba_rms_norm": False, "ssm_multipliers": None}


class TestFalconH1NormFirst(_Recurrent):
    config = TestFalconH1.config | {"mamba_norm_before_gate": True}


class TestJamba(_Recurrent):
    config = SMALL | {
        "architectures": ["JambaForCausalLM"], "model_type": "jamba", "num_hidden_layers": 4,
        "num_experts": 5, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
        "mamba_d_state": 5, "mamba_dt_rank": 7,
    }  # fmt: skip
    bad_configs = (
        {"attn_layer_offset": 3},
        {"hidden_act": "gelu"},
        {"num_experts_per_tok": 6},
        {"mamba_d_conv": 1},
    )


MAMBA = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}


class TestMamba(_Recurrent):
    config = MAMBA | {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "num_hidden_layers": 3,
        "state_size": 5,
    }
    bad_configs = ({"hidden_act": "relu"}, {"state_size": 0}, {"time_step_rank": 0})


class TestFalconMamba(_Recurrent):
    config = TestMamba.config | {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "mixer_rms_eps": 1e-4,
        "use_bias": True,
    }


class TestMamba2(_Recurrent):
    config = MAMBA | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 12,
        "n_groups": 2,
    }
    bad_configs = ({"num_heads": 5}, {"n_groups": 4}, {"conv_kernel": 1})


class TestKimiLinear(_Recurrent):
    config = SMALL | EXPERTS | {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
        "num_hidden_layers": 4, "num_key_value_heads": 4, "linear_num_heads": 3,
        "linear_head_dim": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 10, "routed_scaling_factor": 2.5,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    }  # fmt: skip
    bad_configs = ({"mla_use_nope": False}, {"hidden_act": "gelu"}, {"num_key_value_heads": 2})


def test_published_files_hold_the_text_and_the_experts_otherwise() -> None:
    """Qwen3.5 with images: the text in a module of its own, a layer's experts as one tensor."""
    config = dict(TestQwen35Moe.config)
    plain = load_registry().model_for(config).load()(config)
    source = random_weights(plain)
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": config,
    }
    published = load_registry().model_for(outer).load()(outer)
    found = [
        logits(model, weights)
        for model, weights in ((plain, source), (published, ArraySource(_published(source))))
    ]
    np.testing.assert_array_equal(found[0], found[1])


def _published(source: ArraySource) -> dict[str, F32]:
    arrays = {name: source.part(name).dequantize() for name in source.names()}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = [
            [arrays.pop(f"{prefix}.{expert}.{name}_proj.weight") for expert in range(6)]
            for name in ("gate", "up", "down")
        ]
        gates, ups, downs = (np.stack(part) for part in parts)
        arrays[f"{prefix}.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        arrays[f"{prefix}.down_proj"] = downs
    return {re.sub("^model[.]", "model.language_model.", name): a for name, a in arrays.items()}


def logits(model: Model, source: ArraySource) -> F32:
    """The logits of a few tokens."""
    options = LoadOptions(dtype="f32", max_model_len=32, max_num_seqs=1, num_kv_blocks=2)
    loaded = ReferenceBackend().load(model, source, options)
    row = Row([3, 1, 4, 1, 5], 0, [0], "all", 0)
    return loaded.logits(make_plan([row], 16)).astype(np.float32)
