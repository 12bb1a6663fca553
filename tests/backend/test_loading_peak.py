"""Loading holds little of a checkpoint beside what it has made of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.model import Model
from vllmx_core.plan import AnyArray
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.weights.part import WeightPart, WeightSource
from vllmx_testing.model_suite import random_weights
from vllmx_testing.parts import MadePart

REGISTRY = load_registry()
SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": SMALL | {"architectures": ["LlamaForCausalLM"]},
    "experts": SMALL
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 32,
    },
}
MOST = 0.05
"""Of the weights, beside them: no tensor of these configs is larger."""


class CountingSource:
    """Makes rows of a source when they are asked for, and counts those that somebody still has."""

    def __init__(self, source: WeightSource) -> None:
        self.live = self.peak = self.total = 0
        self._source = source
        self._lock = threading.Lock()

    def names(self) -> Collection[str]:
        return self._source.names()

    def part(self, name: str) -> WeightPart:
        part = self._source.part(name)
        return MadePart(name, part.shape, part.layout, partial(self._rows, part))

    def close(self) -> None:
        self._source.close()

    def _rows(self, part: WeightPart, begin: int, end: int) -> WeightPart:
        rows = part.rows(begin, end)
        buffers = {
            key: replace(raw, stored=self._counted(np.array(raw.data)))
            for key, raw in rows.buffers.items()
        }
        return replace(rows, buffers=buffers)

    def _counted(self, array: AnyArray) -> AnyArray:
        weakref.finalize(array, self._add, -array.nbytes)
        self._add(array.nbytes)
        return array

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.live += num_bytes
            self.peak = max(self.peak, self.live)
            self.total += max(0, num_bytes)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_rows_are_let_go_once_they_are_packed(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLMX_TORCH_DEVICE", "cpu")
    spec = next((one for one in REGISTRY.all(BackendSpec) if one.name == name), None)
    if spec is None or spec.unavailable_reason() is not None:
        pytest.skip(f"the backend {name} does not run here")
    config = CONFIGS[kind]
    model: Model = REGISTRY.model_for(config).load()(config)
    source = CountingSource(random_weights(model))
    loaded = spec.load()().load(
        model,
        source,
        LoadOptions(
            dtype="f32", max_model_len=128, num_kv_blocks=16, max_num_seqs=2, num_threads=1
        ),
    )
    weights = loaded.info.weight_bytes
    loaded.close()
    assert source.total >= 0.9 * weights  # all of it came by here
    assert source.peak <= MOST * weights
