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
OTHERS = {"InternLMForCausalLM", "MiMoForCausalLM", "YiForCausalLM"}
"""Below, each with what it has of its own."""


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


def test_mimo_is_qwen2_without_its_further_layers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllmx.models"):
        assert spec("MiMoForCausalLM", num_nextn_predict_layers=1) == spec("Qwen2ForCausalLM")
    assert caplog.messages == ["layers of multi-token prediction are passed over: 1"]
