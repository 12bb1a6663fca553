"""Finds the processor of images that a model folder describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllmx_core.errors import ConfigError, excerpt, shown

from vllmx_engine.images.pieces import IdeficsImages, InternImages
from vllmx_engine.images.processor import ImageProcessor
from vllmx_engine.images.video import VideoProcessor
from vllmx_engine.images.whole import (
    ClipImages,
    Gemma4Images,
    GemmaImages,
    GlmImages,
    LightOnImages,
    PixtralImages,
    QwenImages,
    SiglipImages,
)
from vllmx_engine.text.model_files import read_json_object

_WITH_VIDEOS = ("qwen3_vl", "qwen3_vl_moe")
"""Model types that were compared."""


def find_video_processor(folder: Path) -> VideoProcessor | None:
    """The processor of videos that a model folder describes; None where it has none, or another
    one. Raises ConfigError for one that is damaged."""
    name = "video_preprocessor_config.json"
    config = read_json_object(folder / name)
    if not config:
        name = "processor_config.json"
        config = read_json_object(folder / name).get("video_processor") or {}
    if not isinstance(config, Mapping):
        return None
    if config.get("video_processor_type") != "Qwen3VLVideoProcessor":
        return None
    if read_json_object(folder / "config.json").get("model_type") not in _WITH_VIDEOS:
        return None
    return _made(VideoProcessor, config, str(folder / name))


_SHARED = ("scale_factor", "downsample_ratio", "spatial_merge_size", "model_type")


def find_processor(folder: Path) -> ImageProcessor | None:
    """The processor that a model folder describes; None where it has none.

    Raises ConfigError for one that is damaged or not known.
    """
    config, name = read_json_object(folder / "preprocessor_config.json"), "preprocessor_config.json"
    if not config:
        name = "processor_config.json"
        config = read_json_object(folder / name).get("image_processor") or {}
    if not isinstance(config, Mapping) or not config:
        return None
    return processor_of({**_of_tower(folder), **config}, str(folder / name))


def _of_tower(folder: Path) -> dict[str, Any]:
    """Sizes that processors share with the tower, which some files of processors leave out."""
    model = read_json_object(folder / "config.json")
    vision = model.get("vision_config")
    patch = vision.get("patch_size") if isinstance(vision, Mapping) else None
    if isinstance(patch, list):  # height and width
        patch = patch[0] if patch else None
    return {
        "patch_size": patch,
        "tower_patch_size": patch,
        **{key: model.get(key) for key in _SHARED},
    }


def processor_of(config: Mapping[str, Any], place: str) -> ImageProcessor:
    """The processor that a preprocessor_config.json describes. Raises ConfigError for one that is
    damaged or not known."""
    kind = str(config.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    make = _OF_MODELS.get(str(config.get("model_type"))) or _KINDS.get(kind)
    if make is None:
        raise ConfigError(
            f"{place} names the image processor {shown(kind)}, which is not known here; known:"
            f" {', '.join(_KINDS)}; leave images out by --limit-images 0"
        )
    return _made(make, config, place)


P = TypeVar("P", bound=ImageProcessor)


def _made(make: Callable[[Mapping[str, Any]], P], config: Mapping[str, Any], place: str) -> P:
    try:
        return make(config)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{place} describes no image processor that can be used ({excerpt(str(error))}):"
            " download the file again, or leave images out by --limit-images 0"
        ) from error


_KINDS: dict[str, Callable[[Mapping[str, Any]], ImageProcessor]] = {
    "PixtralImageProcessor": PixtralImages,
    "Qwen2VLImageProcessor": QwenImages,
    "CLIPImageProcessor": ClipImages,
    "Gemma3ImageProcessor": GemmaImages,
    "Gemma4ImageProcessor": Gemma4Images,
    "Glm46VImageProcessor": GlmImages,
    "Glm4vImageProcessor": GlmImages,
    "GotOcr2ImageProcessor": InternImages,
    "Idefics3ImageProcessor": IdeficsImages,
    "LlavaImageProcessor": ClipImages,
    "SiglipImageProcessor": SiglipImages,
    "SmolVLMImageProcessor": IdeficsImages,
}
_OF_MODELS: dict[str, Callable[[Mapping[str, Any]], ImageProcessor]] = {
    "lighton_ocr": LightOnImages
}
"""Processors by model type, for kinds that several models share."""
