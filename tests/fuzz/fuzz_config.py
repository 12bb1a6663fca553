"""Fuzz target: any bytes as config.json, up to the constructed model and its recorded step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from vllmx_core.errors import OpError, VllmxError
from vllmx_core.plugins.checkpoint import Checkpoint, build_model
from vllmx_core.plugins.specs import ModelSpec
from vllmx_core.recorded.recording import record
from vllmx_core.system.json_files import read_json_object
from vllmx_models.quantization.detect import find_quantization
from vllmx_testing.synthetic import ArraySource

from .folders import folder_of, registry
from .mutations import DEEP_TEXTS, as_json, changed_json, odd_json

POSITIONS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_attention_heads": 4,
    "head_dim": 8,
    "patch_size": 8,
    "out_hidden_size": 32,
}
OUTER: dict[str, Any] = {
    "image_token_id": 61,
    "image_token_index": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    "mm_tokens_per_image": 4,
}
TRAITS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                         "original_max_position_embeddings": 128}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 128}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                      "original_max_position_embeddings": 128}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4},
                         "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
    {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 16,
     "use_sliding_window": True, "max_window_layers": 2},
    {"no_rope_layers": [1, 0, 1, 0], "no_rope_layer_interval": 4},
)  # fmt: skip
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3VLForConditionalGeneration": ({"mrope_section": [2, 1, 1]}, {
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "rope_parameters": {}}),
    "Qwen3_5ForConditionalGeneration": ({"mrope_section": [1, 0, 0]}, {
        "num_position_embeddings": 16, "deepstack_visual_indexes": [], "rope_parameters": {}}),
    "Qwen2_5_VLForConditionalGeneration": ({"mrope_section": [2, 1, 1]}, {
        "window_size": 56, "fullatt_block_indexes": [1], "rope_parameters": {}}),
    "Gemma3ForConditionalGeneration": ({}, {"image_size": 32, "vision_use_head": False}),
    "Gemma4ForConditionalGeneration": ({}, {"rope_parameters": {}}),
}  # fmt: skip
"""The text's rotation, and what towers are described by beside `TOWER`."""
DATA = Path(__file__).parents[1] / "data" / "configs"


def one_input(data: bytes) -> bool:
    """Whether `data` configures a model. Only errors made for users are expected."""
    with folder_of({"config.json": data}) as folder:
        try:
            config = read_json_object(folder / "config.json")
            assert config is not None
            find_quantization(folder, config)
            model = build_model(
                registry(), Checkpoint(folder, config, weights=ArraySource({}, "f32"))
            )
            record(model, min(model.shape.max_model_len, POSITIONS))
        except OpError:  # a config that fits is a mistake of ours
            raise
        except VllmxError:
            return False
    return True


def mutations() -> st.SearchStrategy[bytes]:
    """Configs of every architecture that say something else, and any bytes."""
    valid = [json.loads(seed) for seed in seeds()]
    real = [json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))]
    keys = sorted({key for config in valid + real for key in _keys(config)})
    return st.one_of(
        changed_json(valid + real, keys).map(as_json),
        odd_json(list(map(as_json, valid + real))),
        DEEP_TEXTS,
        st.binary(max_size=60),
    )


def seeds() -> list[bytes]:
    """A small config of every architecture, with each trait that it takes."""
    names = sorted({name for spec in registry().all(ModelSpec) for name in spec.architectures})
    configs = [SIZES | trait | {"architectures": [name]} for name in names for trait in TRAITS]
    configs += seeing()
    return [data for data in (json.dumps(config).encode() for config in configs) if one_input(data)]


def seeing() -> list[dict[str, Any]]:
    """A small config of each kind of tower."""
    return [
        OUTER
        | {"architectures": [name], "vision_config": TOWER | tower}
        | {"text_config": SIZES | ({"rope_parameters": turned} if turned else {})}
        for name, (turned, tower) in SEEING.items()
    ]


def _keys(value: Any) -> set[str]:
    """Names at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()
