"""The plugin under vllmx's conformance kit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from vllmx_example_model.phi import Phi
from vllmx_testing.model_suite import ModelSuite
from vllmx_testing.plugins import check_plugin

CONFIG: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"],
    "model_type": "phi",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 256,
    "layer_norm_eps": 1e-5,
}


def test_plugin() -> None:
    assert check_plugin("vllmx_example_model.plugin").provides == (
        "model phi",
        "model flex-olmo",
        "model mamba2",
        "model olmo-hybrid",
        "model electra",
        "model electra-classifier",
    )


class TestPhi(ModelSuite):
    config = CONFIG | {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}
    bad_configs: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"qk_layernorm": True},
        {"hidden_act": "swish"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"num_attention_heads": 5},
        {"partial_rotary_factor": 0.25},
    )

    def make_model(self, config: dict[str, Any]) -> Phi:
        return Phi(config)

    def transformers_model(self) -> Any:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        config = transformers.PhiConfig(**self.config, attn_implementation="eager")
        model = transformers.PhiForCausalLM(config).eval()
        for parameter in model.parameters():  # biases start at zero, which would hide them
            torch.nn.init.normal_(parameter, std=0.2)
        return model


class TestPhiWithNewConfig(TestPhi):
    """transformers 5 writes RoPE's numbers under rope_parameters."""

    config = CONFIG | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.34,
        }
    }
    bad_configs = ()
