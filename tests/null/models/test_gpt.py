"""Decoders of GPT-2's kind: names that published checkpoints have, and configs that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.weights.map import assemble
from vllmx_testing.model_suite import random_weights
from vllmx_testing.synthetic import ArraySource

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 61,
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
}
OPT = GPT2 | {"architectures": ["OPTForCausalLM"], "ffn_dim": 72}


def built(config: dict[str, Any]) -> Any:
    return load_registry().model_for(config).load()(config)


@pytest.mark.parametrize(
    ("config", "prefix", "published"),
    [(GPT2, "transformer.", ""), (OPT, "model.decoder.", "model.")],
    ids=["gpt2", "the text of BLIP-2"],
)
def test_other_names_of_tensors(config: dict[str, Any], prefix: str, published: str) -> None:
    model = built(config)
    source = random_weights(model)
    arrays = {name: source.part(name).dequantize() for name in source.names()}
    other = ArraySource(
        {published + name.removeprefix(prefix): array for name, array in arrays.items()}
    )
    assert not set(other.names()) & set(source.names())
    for spec in model.weights():
        for found, wanted in zip(assemble(spec, other), assemble(spec, source), strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=spec.name)


def test_matrices_are_stored_by_their_inputs() -> None:
    source = random_weights(built(GPT2))
    assert source.part("transformer.h.1.attn.c_attn.weight").shape == (48, 144)
    assert source.part("transformer.h.1.mlp.c_proj.weight").shape == (192, 48)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2 | {"n_embd": 50}, "hidden_size = 50 is not a multiple"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention = True is not known here"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before = False is not known"),
        (OPT | {"word_embed_proj_dim": 24}, "word_embed_proj_dim = 24 must be hidden_size = 48"),
        (
            GPT2 | {"architectures": ["GPTNeoForCausalLM"], "attention_layers": ["near"] * 2},
            "attention_layers = .* must be a list of global or local",
        ),
        (
            GPT2 | {"architectures": ["FalconForCausalLM"], "alibi": True},
            "alibi = True changes the model",
        ),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        built(config)
