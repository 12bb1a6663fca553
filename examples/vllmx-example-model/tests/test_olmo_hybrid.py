"""The hybrid of recurrent layers and attention under vllmx's conformance kit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from vllmx_core.model import Model
from vllmx_example_model.olmo_hybrid import olmo_hybrid
from vllmx_testing import model_suite
from vllmx_testing.model_suite import ModelSuite
from vllmx_testing.synthetic import ArraySource


def published(saved: ArraySource) -> ArraySource:
    """The checkpoint with taps as wide as q, k and v, which transformers saves in equal thirds."""
    arrays = {name: saved.part(name).dequantize() for name in saved.names()}
    for first in [name for name in arrays if name.endswith(".q_conv1d.weight")]:
        names = [first.replace(".q_conv1d.", f".{one}_conv1d.") for one in "qkv"]
        widths = [len(arrays[name.replace("_conv1d", "_proj")]) for name in names]
        taps = np.concatenate([arrays[name] for name in names])
        arrays |= zip(names, np.split(taps, np.cumsum(widths)[:-1]), strict=True)
    return ArraySource(arrays)


class TestOlmoHybrid(ModelSuite):
    tolerance = 1e-4
    """States that a key turns round forget no rounding: the reference itself differs by 4e-5 where
    a text is cut otherwise."""
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    bad_configs: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"layer_types": ["full_attention"]},
        {"linear_num_key_heads": 3},
        {"linear_conv_kernel_dim": 1},
        {"hidden_act": "gelu"},
    )

    def test_equals_transformers(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            saved = model_suite._saved
            patch.setattr(model_suite, "_saved", lambda twin: published(saved(twin)))
            super().test_equals_transformers()

    def make_model(self, config: dict[str, Any]) -> Model:
        return olmo_hybrid(config)

    def transformers_model(self) -> Any:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        config = transformers.OlmoHybridConfig(**self.config, attn_implementation="eager")
        model = transformers.OlmoHybridForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                torch.nn.init.normal_(parameter, std=0.2)
        return model


class TestRotatedOlmoHybrid(TestOlmoHybrid):
    """Attention that rotates, in other places, and states without negative eigenvalues."""

    tolerance = 2e-5
    config: ClassVar[dict[str, Any]] = TestOlmoHybrid.config | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "linear_allow_neg_eigval": False,
        "linear_num_key_heads": 2,
    }
