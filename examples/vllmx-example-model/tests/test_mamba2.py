"""The architecture of recurrent layers under vllmx's conformance kit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from vllmx_core.model import Model
from vllmx_example_model.mamba2 import mamba2
from vllmx_testing.model_suite import ModelSuite


class TestMamba2(ModelSuite):
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 6,
        "head_dim": 8,
        "state_size": 12,
        "n_groups": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    bad_configs: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"num_heads": 5},
        {"n_groups": 2},
        {"conv_kernel": 1},
    )

    def make_model(self, config: dict[str, Any]) -> Model:
        return mamba2(config)

    def transformers_model(self) -> Any:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**self.config)).eval()
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                torch.nn.init.normal_(parameter, std=0.2)
        return model
