"""A text model inside a model for images: its config and its tensors by either of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.cache.groups import blocks_of, cache_layout
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import Model, encoder_of
from vllmx_core.plugins.checkpoint import Checkpoint, build_model, text_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.weights.map import assemble
from vllmx_testing.model_suite import random_weights
from vllmx_testing.synthetic import ArraySource

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "sliding_window": 11,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
VISION = {"hidden_size": 8, "num_attention_heads": 2, "image_size": 32, "patch_size": 2}
INSIDE: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": TEXT,
    "vision_config": VISION,
}
ALONE: dict[str, Any] = {**TEXT, "architectures": ["Gemma3ForCausalLM"]}
PREFIXES = ("language_model.model.", "model.language_model.")


def built(config: dict[str, Any]) -> Model:
    model: Model = load_registry().model_for(config).load()(config)
    return model


@pytest.mark.parametrize("prefix", PREFIXES)
def test_tensors_by_either_name(prefix: str) -> None:
    alone, inside = built(ALONE), built(INSIDE)
    arrays = random_weights(alone)
    renamed = ArraySource(
        {
            prefix + name.removeprefix("model."): arrays.part(name).dequantize()
            for name in arrays.names()
        }
    )
    for ours, theirs in zip(alone.weights(), inside.weights(), strict=True):
        assert ours.name == theirs.name
        np.testing.assert_array_equal(assemble(ours, arrays)[0], assemble(theirs, renamed)[0])


def test_the_text_model_is_the_same() -> None:
    alone, inside = built(ALONE), built(INSIDE)
    assert inside.shape.dtype == "bf16"
    assert inside.shape.caches == alone.shape.caches
    assert inside.shape.max_model_len == 131072  # the scaling is inside it
    tables = alone.constants(32), inside.constants(32)
    assert tables[0].keys() == tables[1].keys()
    np.testing.assert_array_equal(tables[0]["rope.0"], tables[1]["rope.0"])


def test_defaults_of_published_configs() -> None:
    sparse = {key: TEXT[key] for key in ("sliding_window", "rope_scaling")}
    model = built({**INSIDE, "text_config": {**sparse, "hidden_size": 3840}})
    assert (model.shape.vocab_size, model.shape.hidden_size) == (262208, 3840)


@pytest.mark.parametrize("text", [3, [], "x"])
def test_refused(text: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="text_config must be an object"):
        built({**INSIDE, "text_config": text})


def test_windows_keep_a_quarter_of_what_whole_layers_would() -> None:
    """Gemma 3 12B: five of six layers hold 1,024 tokens, whatever the length."""
    config = {**INSIDE["text_config"], "num_hidden_layers": 48, "sliding_window": 1024}
    shape = built({**INSIDE, "text_config": config}).shape
    assert [kv.window for kv in shape.kv_specs].count(None) == 8
    layout = cache_layout(shape, grouped=True)
    assert len(layout.groups) == 6
    tokens, block = 32768, 16
    held = blocks_of(layout.windows, tokens, block, 512) * len(layout.places)
    whole = tokens // block * len(shape.caches)
    assert held < whole / 4


@pytest.mark.parametrize("name", ["InternVL", "LightOnOcr", "Llava", "Mistral3"])
def test_a_tower_before_another_text_model_leaves_the_text(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry, text = load_registry(), TEXT | {"model_type": "olmo2", "sliding_window": None}
    alone = built({"architectures": ["Olmo2ForCausalLM"], **text})
    arrays = random_weights(alone)
    kept = {
        f"model.language_{name}": arrays.part(name).dequantize()
        for name in arrays.names()
        if name != "lm_head.weight"
    }
    kept["lm_head.weight"] = arrays.part("lm_head.weight").dequantize()
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "text_config": text,
        "vision_config": VISION,
    }
    whole = Checkpoint(path=Path(), config=config, weights=ArraySource(kept))
    found = text_checkpoint(registry, whole)
    model = build_model(registry, found)
    assert encoder_of(model) is None
    for ours, theirs in zip(alone.weights(), model.weights(), strict=True):
        assert ours == theirs
        np.testing.assert_array_equal(assemble(ours, arrays)[0], assemble(theirs, found.weights)[0])
    (line,) = caplog.messages
    assert f"{name}ForConditionalGeneration is served as Olmo2ForCausalLM: text alone" in line
    config["text_config"] = TEXT | {"model_type": "llama"}
    whole = Checkpoint(path=Path(), config=config, weights=ArraySource({}))
    assert text_checkpoint(registry, whole) is whole
