"""Llama's layout by other names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import ModelSpec
from vllmx_models.blocks.norms import PRE
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

CONFIG: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
}


def spec(architecture: str, **config: Any) -> DecoderSpec:
    whole = {**CONFIG, **config, "architectures": [architecture]}
    model = load_registry().model_for(whole).load()(whole)
    assert isinstance(model, Decoder)
    return model.spec


LLAMAS = [
    "AquilaForCausalLM",
    "AquilaModel",
    "LLaMAForCausalLM",
    "XverseForCausalLM",
    "InternLM3ForCausalLM",
]
OTHERS = {
    "DeciLMForCausalLM",
    "InternLMForCausalLM",
    "MiMoForCausalLM",
    "PhiMoEForCausalLM",
    "YiForCausalLM",
}
"""Below, each with what it has of its own; DeciLM in `test_deci`."""


def test_the_record_has_these() -> None:
    specs = [spec for spec in load_registry().all(ModelSpec) if "layout" in spec.checked]
    assert {name for spec in specs for name in spec.architectures} == {*LLAMAS, *OTHERS}


@pytest.mark.parametrize("name", LLAMAS)
def test_the_same_as_llama(name: str) -> None:
    assert spec(name) == spec("LlamaForCausalLM")


def test_biases_of_internlm() -> None:
    biased = spec("LlamaForCausalLM", attention_bias=True)
    assert spec("InternLMForCausalLM", bias=True) == biased
    assert spec("InternLMForCausalLM", bias=False) == spec("LlamaForCausalLM")
    everywhere = spec("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert spec("InternLM3ForCausalLM", qkv_bias=True, bias=True) == everywhere


def test_yi_has_names_of_its_own() -> None:
    found = spec("YiForCausalLM")
    assert {one.norms.before_mixer for one in found.layers} == {"ln1"}
    plain = tuple(replace(one, norms=PRE) for one in found.layers)
    assert replace(found, layers=plain) == spec("LlamaForCausalLM")


def test_published_phi_moe_has_another_class() -> None:
    """Its RoPE has a factor for short texts and one for long ones, which are equal."""
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "factor": 4.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    named = {"rope_scaling": rope | {"attention_factor": 1.25}, **experts}
    published = {"rope_scaling": rope | {"short_mscale": 1.25, "long_mscale": 1.25}, **experts}
    assert spec("PhiMoEForCausalLM", **published) == spec("PhimoeForCausalLM", **named)


def test_mimo_is_qwen2_with_a_further_layer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllmx.models"):
        found = spec("MiMoForCausalLM", num_nextn_predict_layers=1)
    assert found.prediction is not None
    assert replace(found, prediction=None) == spec("Qwen2ForCausalLM")
    assert caplog.messages == ["the checkpoint has layers of multi-token prediction: 1"]
