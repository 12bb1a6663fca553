"""Qwen2-VL (Qwen2VLForConditionalGeneration) and Qwen2.5-VL (Qwen2_5_VLForConditionalGeneration):
Qwen2 whose rotations turn the tokens of images by time, row and column. The tower of Qwen2.5-VL has
windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import text_config
from vllmx_models.families.qwen import qwen2
from vllmx_models.families.qwen_images import (
    sectioned_axes,
    sees_images,
    vision_reader,
    with_images,
    without_sections,
)
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.rope import SECTIONS, stated_sections, with_sections
from vllmx_models.towers.qwen2_5_vl import WindowTower
from vllmx_models.towers.qwen2_vl import Qwen2Tower
from vllmx_models.trunks.decoder import Decoder, ModelNames

_DEFAULTS = {"rope_theta": 1_000_000.0}
_SECTIONS = [16, 24, 24]


def qwen2_5_vl(config: Mapping[str, Any]) -> Decoder:
    """Images are supported, videos are not."""
    return _seeing(config, ConfigReader(config, "Qwen2_5_VLForConditionalGeneration"), _tower)


def qwen2_vl(config: Mapping[str, Any]) -> Decoder:
    """Images are supported, videos are not."""
    return _seeing(config, ConfigReader(config, "Qwen2VLForConditionalGeneration"), _qwen2_tower)


Tower = Callable[[ConfigReader], WindowTower | Qwen2Tower]


def _seeing(config: Mapping[str, Any], outer: ConfigReader, tower: Tower) -> Decoder:
    text, sections = without_sections({**_DEFAULTS, **text_config(config, {})})
    decoder = qwen2(text)
    names = ModelNames(also=("model.", "model.language_model."))
    decoder = Decoder(replace(decoder.spec, names=names))
    if not sees_images(config):
        return decoder
    axes = sectioned_axes(outer, sections, _SECTIONS)
    return with_images(decoder, tower(outer), axes, outer)


def _sizes(read: ConfigReader, key: str, size: int) -> dict[str, Any]:
    """The fields of a `PatchTower` that both have; `key`: the one of the hidden size."""
    size = read.integer(key, size)
    heads = read.integer("num_heads", 16)
    if size % heads or size // heads % 4:
        raise read.error("num_heads", f"must divide {key} = {size} into multiples of 4")
    if read.integer("in_channels", read.config.get("in_chans", 3)) != 3:
        raise read.error("in_channels", "must be 3")
    return {
        "depth": read.integer("depth", 32, high=1024),
        "hidden_size": size,
        "num_heads": heads,
        "patch": read.integer("patch_size", 14, high=256),
        "frames": read.integer("temporal_patch_size", 2, high=16),
        "merge": read.integer("spatial_merge_size", 2, high=16),
        "theta": read.part("rope_parameters").number("rope_theta", 10000.0),
    }


def _qwen2_tower(outer: ConfigReader) -> Qwen2Tower:
    read = vision_reader(outer)
    sizes = _sizes(read, "embed_dim", 1280)
    return Qwen2Tower(
        **sizes,
        mlp_size=sizes["hidden_size"] * read.integer("mlp_ratio", 4, high=64),
        activation=read.activation(default="quick_gelu", also=("quick_gelu",)),
        out_size=read.integer("hidden_size", 3584),
    )


def _tower(outer: ConfigReader) -> WindowTower:
    read = vision_reader(outer)
    sizes = _sizes(read, "hidden_size", 3584)
    patch, merge = sizes["patch"], sizes["merge"]
    window = read.integer("window_size", 112) // merge // patch
    if not window:
        raise read.error("window_size", f"must hold {merge} x {merge} patches of {patch}")
    whole = read.config.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(whole, list) or any(type(one) is not int for one in whole):
        raise read.error("fullatt_block_indexes", "must be a list of layers")
    return WindowTower(
        **sizes,
        mlp_size=read.integer("intermediate_size", 3420),
        activation=read.activation(),
        window=window,
        whole=frozenset(whole),
        out_size=read.integer("out_hidden_size", 3584),
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    return with_sections(decoder_config(header, SECTIONS), header)


GGUF = GGUFArchitecture(
    "Qwen2_5_VLForConditionalGeneration",
    config=_gguf_config,
    kept=lambda config: stated_sections(config, _SECTIONS),
)
