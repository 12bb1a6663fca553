"""The conformance suite for an architecture that is served, on all backends that can run here."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.model import Model
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.recorded.recording import prepare
from vllmx_testing.model_suite import ModelSuite

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
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN2_MOE: dict[str, Any] = EXPERTS | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 28,
    "mlp_only_layers": [1],
}
"""Routed experts, one that is shared, and a layer without experts."""


class Served(ModelSuite):
    """A subclass gives `config`, a tiny one of its architecture."""

    auto_class = "AutoModelForCausalLM"
    """The class of transformers that knows the model's own."""

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
        model = getattr(transformers, self.auto_class).from_config(config).float().eval()
        for parameter in model.parameters():  # biases start at zero, which would hide them
            torch.nn.init.normal_(parameter, std=0.2)
        for name, buffer in model.named_buffers():  # a part of the checkpoint, starts at one
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
        return model


def suites(*modules: ModuleType) -> dict[str, type[Served]]:
    """The suites that these modules define, by the names of their classes."""
    return {
        name: found
        for module in modules
        for name, found in vars(module).items()
        if name.startswith("Test") and isinstance(found, type) and issubclass(found, Served)
    }
