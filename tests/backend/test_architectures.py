"""The conformance suite on every architecture that is served: all backends that can run here."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_core.model import Model
from vllmx_core.registry import Registry, load_registry
from vllmx_core.specs import ModelSpec
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


class _Served(ModelSuite):
    def make_model(self, config: dict[str, Any]) -> Model:
        model: Model = REGISTRY.model_for(config).load()(config)
        return model

    def transformers_model(self) -> Any:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**self.config, attn_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():  # biases start at zero, which would hide them
            torch.nn.init.normal_(parameter, std=0.2)
        return model


class TestLlama(_Served):
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


class TestMistral(_Served):
    config = SMALL | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 11,
    }  # fmt: skip


class TestQwen2(_Served):
    config = SMALL | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
        "sliding_window": 11, "max_window_layers": 1,
    }  # fmt: skip


class TestQwen3(_Served):
    config = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 20}


class TestSmolLM3(_Served):
    config = SMALL | {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 5,
    }  # fmt: skip


def test_no_architecture_is_missing() -> None:
    tested = {suite.config["architectures"][0] for suite in _Served.__subclasses__()}
    served = [spec for spec in REGISTRY.all(ModelSpec) if "vllmx-models" in REGISTRY.provider(spec)]
    assert len(served) >= 5
    assert tested == {name for spec in served for name in spec.architectures}
