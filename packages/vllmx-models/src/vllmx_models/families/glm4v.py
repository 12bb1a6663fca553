"""GLM-4.1V, 4.5V and 4.6V (Glm4vForConditionalGeneration, Glm4vMoeForConditionalGeneration and
Glm46VForConditionalGeneration): GLM-4, dense and with experts, whose rotations turn the tokens of
images by time, row and column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.vit import square
from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import text_config
from vllmx_models.families.glm4 import glm4
from vllmx_models.families.glm4_moe import glm4_moe
from vllmx_models.families.qwen_images import (
    sectioned_axes,
    sees_images,
    vision_reader,
    with_images,
    without_sections,
)
from vllmx_models.text_types import TEXT_TYPES
from vllmx_models.towers.glm4v import GlmTower
from vllmx_models.trunks.decoder import Decoder, ModelNames

_NAMES = ModelNames(also=("model.", "model.language_model."))
_SECTIONS = [8, 12, 12]


def glm4v(config: Mapping[str, Any]) -> Decoder:
    """Images are supported, videos are not."""
    defaults = TEXT_TYPES["glm4"]["glm4v_text"]
    return _seeing(config, "Glm4vForConditionalGeneration", _dense, defaults)


def glm4v_moe(config: Mapping[str, Any]) -> Decoder:
    """Images are supported, videos are not."""
    defaults = TEXT_TYPES["glm4_moe"]["glm4v_moe_text"]
    return _seeing(config, "Glm4vMoeForConditionalGeneration", glm4_moe, defaults)


def glm46v(config: Mapping[str, Any]) -> Decoder:
    """GLM-4.6V, dense or with experts."""
    text = config.get("text_config")
    experts = isinstance(text, Mapping) and text.get("model_type") == "glm4v_moe_text"
    return glm4v_moe(config) if experts else glm4v(config)


def glm_ocr(config: Mapping[str, Any]) -> Decoder:
    """GLM-OCR: a tower without a table of positions."""
    defaults = TEXT_TYPES["glm4"]["glm_ocr_text"]
    return _seeing(config, "GlmOcrForConditionalGeneration", _ocr_text, defaults, _ocr_tower)


def _ocr_text(text: Mapping[str, Any]) -> Decoder:
    """Queries, keys and values have no biases, whatever the config says."""
    read = ConfigReader(text, "GlmOcrForConditionalGeneration")
    size = read.integer("hidden_size") // read.integer("num_attention_heads")
    return glm4({"head_dim": size, **text, "attention_bias": False})


def _dense(text: Mapping[str, Any]) -> Decoder:
    """Heads share the hidden size, whatever `head_dim` says."""
    read = ConfigReader(text, "Glm4vForConditionalGeneration")
    size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    return glm4({**text, "head_dim": size // heads})


def _seeing(
    config: Mapping[str, Any],
    name: str,
    make: Callable[[Mapping[str, Any]], Decoder],
    defaults: Mapping[str, Any],
    tower: Callable[[ConfigReader], GlmTower] | None = None,
) -> Decoder:
    text, sections = without_sections(text_config(config, defaults))
    decoder = make(text)
    decoder = Decoder(replace(decoder.spec, names=_NAMES, prediction=None))
    if not sees_images(config):
        return decoder
    outer = ConfigReader(config, name)
    axes = sectioned_axes(outer, sections, _SECTIONS)
    return with_images(decoder, (tower or _tower)(outer), axes, outer)


def _tower(outer: ConfigReader) -> GlmTower:
    read = vision_reader(outer)
    patch, out = square(read, "patch_size", 14, 256), read.integer("out_hidden_size", 4096)
    side = square(read, "image_size", 336, 1 << 14) // patch
    if not side:
        raise read.error("image_size", f"must hold a patch of {patch} pixels")
    return GlmTower(
        **_sizes(read, 1536, 12),
        mlp_size=out,
        out_size=out,
        table_side=side,
        merger_size=read.integer("intermediate_size", 13696),
        qkv_bias=read.flag("attention_bias", False),
    )


def _ocr_tower(outer: ConfigReader) -> GlmTower:
    read = vision_reader(outer)
    out, bias = read.integer("out_hidden_size", 1536), read.flag("attention_bias", True)
    return GlmTower(
        **_sizes(read, 1024, 16),
        mlp_size=read.integer("intermediate_size", 4096),
        out_size=out,
        table_side=0,
        merger_size=3 * out,
        qkv_bias=bias,
        bias=bias,
        qk_norm=True,
    )


def _sizes(read: ConfigReader, size: int, heads: int) -> dict[str, Any]:
    """The fields of a tower that do not depend on its kind."""
    size, heads = read.integer("hidden_size", size), read.integer("num_heads", heads)
    if size % heads or size // heads % 4:
        raise read.error("num_heads", f"must divide hidden_size = {size} into multiples of 4")
    if read.integer("in_channels", 3) != 3:
        raise read.error("in_channels", "must be 3")
    return {
        "depth": read.integer("depth", 24, high=1024),
        "hidden_size": size,
        "num_heads": heads,
        "activation": read.activation(),
        "patch": square(read, "patch_size", 14, 256),
        "frames": read.integer("temporal_patch_size", 2, high=16),
        "merge": read.integer("spatial_merge_size", 2, high=16),
        "theta": read.part("rope_parameters").number("rope_theta", 10000.0),
        "eps": read.number("rms_norm_eps", 1e-5),
    }
