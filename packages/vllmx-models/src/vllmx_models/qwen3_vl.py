"""Qwen3-VL, dense (Qwen3VLForConditionalGeneration): Qwen3 whose rotations turn the tokens of
images by time, row and column, and whose first layers are given features of the tower's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.model import FeatureSpec

from vllmx_models.config import ConfigReader
from vllmx_models.decoder import Decoder, ModelNames
from vllmx_models.decoder_config import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    rms,
)
from vllmx_models.qwen2 import WINDOW_KEYS, qwen_layers
from vllmx_models.qwen3_vl_tower import QwenTower
from vllmx_models.text_config import text_config

_NAME = "Qwen3VLForConditionalGeneration"
_POSITIONS = 128000
_NAMES = ModelNames(
    "model.language_model.embed_tokens", "model.language_model.layers", "model.language_model.norm"
)


def qwen3_vl(config: Mapping[str, Any]) -> Decoder:
    """Images come as patches; videos are not taken."""
    outer = ConfigReader(config, _NAME)
    text = dict(text_config(config, {}))
    rope, sections = _without_sections(text)
    read = ConfigReader({**text, **rope}, _NAME)
    read.refuse_quirks("attention_bias", *WINDOW_KEYS)
    bias, size = read.flag("attention_bias", False), head_size(read, 128)
    axes = rope_axes(outer, size // 2, sections)
    mixer = attention_mixer(
        read, size, qk_norm=rms(read), qkv_bias=bias, o_bias=bias, rope_axes=axes
    )
    layers = qwen_layers(read, mixer, dense_mlp(read))
    tower = _tower(outer)
    features = FeatureSpec(1 + len(tower.deepstack), read.integer("hidden_size"))
    if tower.out_size != features.width or len(tower.deepstack) > len(layers):
        raise outer.error("vision_config", "makes features that the decoder cannot take")
    spec = decoder_spec(read, layers, default_positions=_POSITIONS, names=_NAMES, features=features)
    return Decoder(spec, tower)


def _without_sections(text: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The rotation's parameters without those of its axes, and those."""
    for key in ("rope_scaling", "rope_parameters"):
        given = text.get(key)
        if isinstance(given, Mapping):
            rest = {name: value for name, value in given.items() if "mrope" not in name}
            if rest.get("type") == "mrope":
                rest["type"] = "default"
            return {key: rest}, given.get("mrope_section")
    return {}, None


def rope_axes(read: ConfigReader, half: int, sections: Any) -> tuple[int, ...]:
    """Which of time, row and column turns each frequency: they take turns as long as their sections
    last, and time has the rest."""
    sections = [24, 20, 20] if sections is None else sections
    given = isinstance(sections, list) and len(sections) == 3
    if not given or any(type(size) is not int or not 0 <= size <= half for size in sections):
        raise read.error("text_config", f"has a mrope_section that is no three parts of {half}")
    axes = [0] * half
    for axis in (1, 2):
        for place in range(axis, min(half, 3 * sections[axis]), 3):
            axes[place] = axis
    return tuple(axes)


def _tower(outer: ConfigReader) -> QwenTower:
    vision = outer.config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise outer.error("vision_config", "must be an object")
    read = ConfigReader(vision, _NAME)
    depth, size = read.integer("depth", high=1024), read.integer("hidden_size")
    heads = read.integer("num_heads")
    if size % heads or size // heads % 4:
        raise read.error("num_heads", f"must divide hidden_size = {size} into multiples of 4")
    entries, deepstack = read.integer("num_position_embeddings", 2304), _deepstack(read, depth)
    side = round(entries**0.5)
    if side * side != entries:
        raise read.error("num_position_embeddings", "must be a square")
    if read.integer("in_channels", 3) != 3:
        raise read.error("in_channels", "must be 3")
    rope = vision.get("rope_parameters") or {}
    return QwenTower(
        depth=depth,
        hidden_size=size,
        num_heads=heads,
        mlp_size=read.integer("intermediate_size"),
        activation=read.activation(default="gelu_pytorch_tanh"),
        patch=read.integer("patch_size", 16, high=256),
        frames=read.integer("temporal_patch_size", 2, high=16),
        merge=read.integer("spatial_merge_size", 2, high=16),
        table_side=side,
        out_size=read.integer("out_hidden_size"),
        theta=ConfigReader(rope, _NAME).number("rope_theta", 10000.0),
        deepstack=deepstack,
    )


def _deepstack(read: ConfigReader, depth: int) -> tuple[int, ...]:
    given = read.config.get("deepstack_visual_indexes", [8, 16, 24])
    found = read.integers("deepstack_visual_indexes", 0) if given is None else list(given)
    if any(type(i) is not int or not 0 <= i < depth for i in found) or found != sorted(set(found)):
        raise read.error("deepstack_visual_indexes", f"must be ascending layers below {depth}")
    return tuple(found)
