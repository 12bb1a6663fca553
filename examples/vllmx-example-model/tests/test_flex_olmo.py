"""The architecture with experts under vllmx's conformance kit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from vllmx_core.model import Model
from vllmx_example_model.flex_olmo import flex_olmo
from vllmx_testing.model_suite import ModelSuite


class TestFlexOlmo(ModelSuite):
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["FlexOlmoForCausalLM"],
        "model_type": "flex_olmo",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "eos_token_id": None,
    }
    bad_configs: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"num_experts_per_tok": 7},
        {"num_attention_heads": 5},
        {"hidden_act": "no_such"},
        {"rope_scaling": {"rope_type": "no_such"}},
    )

    def make_model(self, config: dict[str, Any]) -> Model:
        return flex_olmo(config)

    def transformers_model(self) -> Any:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        config = transformers.FlexOlmoConfig(**self.config, attn_implementation="eager")
        model = transformers.FlexOlmoForCausalLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return model
