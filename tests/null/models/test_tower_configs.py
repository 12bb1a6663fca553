"""Configs of models with image towers that cannot be served: errors that name the key."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_core.errors import InvalidRequestError, UnsupportedModelError
from vllmx_core.model import encoder_of
from vllmx_core.plugins.registry import load_registry

REGISTRY = load_registry()
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SQUARES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 24,
}
PATCHES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "embed_dim": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "InternVLForConditionalGeneration": ("qwen3", SQUARES),
    "LlavaForConditionalGeneration": ("llama", SQUARES),
    "Mistral3ForConditionalGeneration": ("mistral", SQUARES),
    "LightOnOcrForConditionalGeneration": ("qwen3", SQUARES),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", PATCHES | {"hidden_size": 64}),
    "Glm4vForConditionalGeneration": ("glm4v_text", PATCHES),
}


def built(name: str, vision: dict[str, Any], **outer: Any) -> Any:
    kind, tower = TOWERS[name]
    rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e4}
    text = TEXT | {"model_type": kind}
    if "depth" in tower:
        text |= {"rope_parameters": rope}
    config = {"text_config": text, "vision_config": tower | vision, "architectures": [name]} | outer
    return REGISTRY.model_for(config).load()(config)


WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("InternVL", {"norm_type": "batch_norm"}, {}, "norm_type"),
    ("InternVL", {"use_mean_pooling": False}, {}, "use_mean_pooling"),
    ("InternVL", {"image_size": [24, 28]}, {}, "image_size"),
    ("InternVL", {"patch_size": 0}, {}, "patch_size"),
    ("InternVL", {"patch_size": [1 << 20, 1 << 20]}, {}, "patch_size"),
    ("InternVL", {"image_size": 2}, {}, "image_size"),
    ("InternVL", {"num_attention_heads": 3}, {}, "num_attention_heads"),
    ("InternVL", {}, {"downsample_ratio": 5e-324}, "downsample_ratio"),
    ("InternVL", {}, {"downsample_ratio": 0.25}, "downsample_ratio"),
    ("InternVL", {}, {"downsample_ratio": 2.0}, "downsample_ratio"),
    ("InternVL", {}, {"vision_feature_layer": 4}, "vision_feature_layer"),
    ("InternVL", {}, {"text_config": TEXT | {"model_type": "bloom"}}, "model_type"),
    ("Llava", {}, {"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
    ("Llava", {}, {"vision_feature_layer": 0}, "vision_feature_layer"),
    ("Llava", {}, {"vision_feature_select_strategy": "full"}, "select_strategy"),
    ("Llava", {"num_channels": 4}, {}, "num_channels"),
    ("Mistral3", {"head_dim": 8}, {}, "head_dim"),
    ("Mistral3", {}, {"spatial_merge_size": 0}, "spatial_merge_size"),
    ("Mistral3", {}, {"vision_feature_layer": -2}, "vision_feature_layer"),
    ("LightOnOcr", {"num_attention_heads": 16}, {}, "num_attention_heads"),
    ("Qwen2VL", {"mlp_ratio": 1 << 20}, {}, "mlp_ratio"),
    ("Qwen2VL", {"hidden_act": "mish"}, {}, "hidden_act"),
    ("Qwen2VL", {"hidden_size": 48}, {}, "vision_config"),
    ("Glm4v", {"image_size": 2}, {}, "image_size"),
    ("Glm4v", {"num_heads": 16}, {}, "num_heads"),
    ("Glm4v", {"depth": 1 << 20}, {}, "depth"),
]


@pytest.mark.parametrize(("name", "vision", "outer", "key"), WRONG)
def test_configs(name: str, vision: dict[str, Any], outer: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        built(f"{name}ForConditionalGeneration", vision, **outer)


@pytest.mark.parametrize("name", TOWERS)
def test_grids(name: str) -> None:
    """No tower takes an image that is empty, of several frames, or larger than it can be."""
    encoder = encoder_of(built(name, {}))
    assert encoder is not None
    for grid in ((1, 0, 0), (2, 6, 6), (1, 1 << 20, 2), (1, -2, -2), (1, 5, 7)):
        if name.startswith("Llava") or grid != (1, 5, 7):
            with pytest.raises(InvalidRequestError, match="cannot see"):
                encoder.places(grid)


def test_an_unknown_tower_leaves_the_text(caplog: pytest.LogCaptureFixture) -> None:
    model = built("LlavaForConditionalGeneration", {"model_type": "dinov2"})
    assert encoder_of(model) is None
    assert model.shape.features is None
    assert "text alone is served" in caplog.text
