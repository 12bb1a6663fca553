"""Models that answer with vectors on the CUDA backend, on the emulator and beside numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllmx_core.backend import Backend
from vllmx_core.model import Model
from vllmx_core.plugins.checkpoint import Checkpoint, build_model
from vllmx_core.plugins.registry import load_registry
from vllmx_cuda.backend import CudaBackend
from vllmx_testing.cuda.emulator import Emulator
from vllmx_testing.harness import Harness
from vllmx_testing.model_suite import random_weights
from vllmx_testing.op_checks import CASES, TEXTS, case_model
from vllmx_testing.plans import Row
from vllmx_testing.synthetic import ArraySource

from .cuda_models import _can_emulate
from .test_cuda_emulated import LaunchingDevice

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator()
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}
LAYERS = ["sliding_attention", "full_attention"]
ROPE = {layer: {"rope_type": "default", "rope_theta": 10000.0} for layer in LAYERS}
MODELS: dict[str, dict[str, Any]] = {
    "BERT": {
        "architectures": ["BertModel"], "model_type": "bert", "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    },
    "BERT's scores": {
        "architectures": ["BertForSequenceClassification"], "model_type": "bert",
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    },
    "ModernBERT": {
        "architectures": ["ModernBertModel"], "model_type": "modernbert", "local_attention": 12,
        "hidden_activation": "gelu", "norm_eps": 1e-5, "layer_types": LAYERS,
        "rope_parameters": ROPE,
    },
    "EmbeddingGemma": {
        "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "head_dim": 32,
        "num_key_value_heads": 1, "use_bidirectional_attention": True, "sliding_window": 12,
        "query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "layer_types": LAYERS, "rope_parameters": ROPE,
    },
    "Qwen3-Embedding": {
        "architectures": ["Qwen3Model"], "model_type": "qwen3", "num_key_value_heads": 2,
        "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_parameters": ROPE["full_attention"],
    },
}  # fmt: skip
IDS = np.random.default_rng(3).integers(2, 61, 50).tolist()
STEPS = [
    [
        Row(IDS[:19], 0, [0, 1], types=[0] * 9 + [1] * 10),
        Row([5], 0, [2]),
        Row(IDS, 0, [3, 4, 5, 6]),
    ],
    [Row([7], 0, [2])],
]


def model_of(name: str) -> Model:
    config = SMALL | MODELS[name]
    checkpoint = SimpleNamespace(config=config, weights=ArraySource({}, "f32"))
    return build_model(load_registry(), cast(Checkpoint, checkpoint))


class TestModels(Harness):
    def make_backend(self) -> Backend:
        self.device = LaunchingDevice(emulator=EMULATOR)
        return CudaBackend(lambda: self.device, capture_s=0)

    @pytest.mark.parametrize("name", MODELS)
    def test_near_numpy(self, name: str) -> None:
        model = model_of(name)
        self.compare(model, random_weights(model), STEPS, max_model_len=80)
        assert not self.device.calls["capture"]

    @pytest.mark.parametrize("name", ["ModernBERT", "EmbeddingGemma"])
    def test_segments_on_tensor_cores(self, name: str) -> None:
        """Texts of several tokens in tiles, those of one beside them: coarse, but no garbage."""
        model = model_of(name)
        source = random_weights(model)
        self.compare(model, source, STEPS, tolerance=0.15, dtype="bf16", max_model_len=80)
        assert {"paged_prefill", "paged_decode_mma"} <= self.device.launched

    @pytest.mark.parametrize("dtype", ["bf16", "f16"])
    def test_vectors_are_what_the_device_has(self, dtype: str) -> None:
        """A table's row through a mean of one, to the bit."""
        case = CASES["pool: mean, width 33"]
        model, source = case_model(case, cast(Any, dtype))
        rows = [Row([token], 0, [token % 8]) for token in (3, 1, 4)]
        self.compare(model, source, [rows], tolerance=1e-9, dtype=dtype)
        self.compare(model, source, TEXTS, tolerance=0.02, dtype=dtype)
