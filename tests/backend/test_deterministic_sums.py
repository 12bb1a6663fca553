"""`--deterministic`: the CPU backend computes the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import open_checkpoint, quantise_in_situ
from vllmx_core.plugins.registry import load_registry
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.part import WeightSource
from vllmx_demo.source import MODEL_FOLDER
from vllmx_testing.model_suite import random_weights

from .cpu_ranks import cpu_ranks, logits
from .served_models import QWEN2_MOE
from .test_sharding import CONFIGS, LLAMA

REGISTRY = load_registry()
TEXT = [(7 * at * at + 3) % 59 for at in range(45)]
CUTS = (30, 31, 44)
"""A chunk of many tokens, then some of one or few."""
TINY: dict[str, dict[str, Any]] = {
    "biases, 1 kv head": LLAMA
    | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "experts": LLAMA | QWEN2_MOE,
    "values smaller than keys": CONFIGS["values smaller than keys"],
}


def on_ranks(model: Model, source: WeightSource, ranks: int, dtype: str, **how: bool) -> list[F32]:
    threads = cpu_ranks(model, source, ranks, dtype, **{"deterministic": True} | how)
    found = threads.each(lambda loaded: logits(loaded, TEXT, CUTS))
    threads.each(lambda loaded: loaded.close())
    threads.close()
    return found


def check(model: Model, source: WeightSource, dtype: str, **how: bool) -> F32:
    (expected,) = on_ranks(model, source, 1, dtype, **how)
    for ranks in (2, 4):
        for found in on_ranks(model, source, ranks, dtype, **how):
            np.testing.assert_array_equal(found, expected)
    return expected


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_the_demo_model(kind: str) -> None:
    checkpoint = open_checkpoint(REGISTRY, MODEL_FOLDER)
    model: Model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    weights = checkpoint.weights
    if kind == "q8_0":
        weights = quantise_in_situ(REGISTRY, checkpoint, model, kind).weights
    dtype = "f32" if kind == "f32" else "bf16"
    found = check(model, weights, dtype)
    usual = [on_ranks(model, weights, ranks, dtype, deterministic=False)[0] for ranks in (1, 2)]
    for one in usual:
        np.testing.assert_allclose(found, one, atol=0.1 * np.abs(one).max())
    assert not np.array_equal(*usual), "what the flag is for"
    checkpoint.weights.close()


@pytest.mark.parametrize("name", TINY)
def test_experts_and_biases(name: str) -> None:
    model: Model = REGISTRY.model_for(TINY[name]).load()(TINY[name])
    check(model, random_weights(model), "f32")


def test_whole_experts() -> None:
    model: Model = REGISTRY.model_for(TINY["experts"]).load()(TINY["experts"])
    check(model, random_weights(model), "f32", whole_experts=True)


def test_ranks_that_cannot_share_the_parts() -> None:
    config = LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    model: Model = REGISTRY.model_for(config).load()(config)
    with pytest.raises(ConfigError, match=r"into 2 parts, which 3 ranks .* choose .* 1 or 2, or"):
        sharded(model, random_weights(model), 64, 0, 3, deterministic=True)
