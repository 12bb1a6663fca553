"""Images in front of Qwen's decoders: rotations by time, row and column, the tower that a config
describes, and a text model behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import FeatureSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.config import ConfigReader
from vllmx_models.towers.glm4v import GlmTower
from vllmx_models.towers.qwen2_5_vl import WindowTower
from vllmx_models.towers.qwen2_vl import Qwen2Tower
from vllmx_models.towers.qwen3_vl import QwenTower
from vllmx_models.trunks.decoder import Decoder, LayerSpec

Axes = Callable[[int], tuple[int, ...]]
"""A function from a number of frequencies to `AttentionSpec.rope_axes`."""


def sees_images(config: Mapping[str, Any]) -> bool:
    """True if the config describes a vision tower."""
    return config.get("vision_config") is not None


def vision_reader(outer: ConfigReader) -> ConfigReader:
    """Reads `vision_config`."""
    vision = outer.config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise outer.error("vision_config", "must be an object")
    return ConfigReader(vision, outer.architecture)


def without_sections(text: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the config without its multimodal RoPE options, and `mrope_section`."""
    for key in ("rope_scaling", "rope_parameters"):
        given = text.get(key)
        if isinstance(given, Mapping):
            rest = {name: value for name, value in given.items() if "mrope" not in name}
            for name in ("type", "rope_type"):
                if rest.get(name) == "mrope":
                    rest[name] = "default"
            return {**text, key: rest}, given.get("mrope_section")
    return dict(text), None


def interleaved_axes(outer: ConfigReader, found: Any, default: list[int]) -> Axes:
    """Interleaved: time, row and column alternate up to their sections; time takes the rest."""

    def axes(half: int) -> tuple[int, ...]:
        sections, axes = _sections(outer, half, found, default), [0] * half
        for axis in (1, 2):
            for place in range(axis, min(half, 3 * sections[axis]), 3):
                axes[place] = axis
        return tuple(axes)

    return axes


def sectioned_axes(outer: ConfigReader, found: Any, default: list[int]) -> Axes:
    """Sectioned: time has the first frequencies, row the next ones, column the rest."""

    def axes(half: int) -> tuple[int, ...]:
        sections = _sections(outer, half, found, default)
        if sum(sections) != half:
            raise outer.error("text_config", f"has a mrope_section that is no {half} together")
        return tuple(axis for axis in range(3) for _ in range(sections[axis]))

    return axes


def _sections(outer: ConfigReader, half: int, found: Any, default: list[int]) -> list[int]:
    sections = default if found is None else found
    given = isinstance(sections, list) and len(sections) == 3
    if not given or any(type(size) is not int or not 0 <= size <= half for size in sections):
        raise outer.error("text_config", f"has a mrope_section that is not three parts of {half}")
    checked: list[int] = sections
    return checked


def with_images(
    text: Decoder,
    tower: QwenTower | WindowTower | Qwen2Tower | GlmTower,
    axes: Axes,
    outer: ConfigReader,
) -> Decoder:
    """A text model with a vision tower."""
    spec, features = text.spec, FeatureSpec(1 + len(tower.deepstack), tower.out_size)
    if features.width != spec.hidden_size or len(tower.deepstack) > len(spec.layers):
        raise outer.error("vision_config", "makes features that the decoder cannot take")
    layers = tuple(_turned(layer, axes) for layer in spec.layers)
    return Decoder(replace(spec, layers=layers, features=features), tower)


def _turned(layer: LayerSpec, axes: Axes) -> LayerSpec:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionMixer) or mixer.rope is None:
        return layer
    return replace(layer, mixer=replace(mixer, rope_axes=axes(mixer.rope.rotary_dim // 2)))


def qwen_tower(outer: ConfigReader, deepstack: list[int]) -> QwenTower:
    """The tower of Qwen3-VL and Qwen3.5; `deepstack` is the default for absent keys."""
    read = vision_reader(outer)
    depth, size = read.integer("depth", high=1024), read.integer("hidden_size")
    heads = read.integer("num_heads")
    if size % heads or size // heads % 4:
        raise read.error("num_heads", f"must divide hidden_size = {size} into multiples of 4")
    entries = read.integer("num_position_embeddings", 2304)
    side = round(entries**0.5)
    if side * side != entries:
        raise read.error("num_position_embeddings", "must be a square")
    if read.integer("in_channels", 3) != 3:
        raise read.error("in_channels", "must be 3")
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
        theta=read.part("rope_parameters").number("rope_theta", 10000.0),
        deepstack=_deepstack(read, depth, deepstack),
    )


def _deepstack(read: ConfigReader, depth: int, default: list[int]) -> tuple[int, ...]:
    found = read.config.get("deepstack_visual_indexes", default)
    if (
        not isinstance(found, list)
        or any(type(i) is not int or not 0 <= i < depth for i in found)
        or found != sorted(set(found))
    ):
        raise read.error("deepstack_visual_indexes", f"must be ascending layers below {depth}")
    return tuple(found)
