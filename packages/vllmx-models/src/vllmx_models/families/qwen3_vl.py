"""Qwen3-VL, dense and with experts (Qwen3VLForConditionalGeneration,
Qwen3VLMoeForConditionalGeneration): Qwen3 whose rotations turn the tokens of images by time, row
and column, and whose first layers are given features of the tower's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.moe import EachExpert, EitherExperts, MoE, StackedExperts
from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import text_config
from vllmx_models.families.qwen import qwen3
from vllmx_models.families.qwen_images import (
    interleaved_axes,
    qwen_tower,
    sees_images,
    with_images,
    without_sections,
)
from vllmx_models.families.qwen_moe import qwen3_moe
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.rope import SECTIONS, stated_sections, with_sections
from vllmx_models.trunks.decoder import Decoder, ModelNames

_DEFAULTS = {"rope_theta": 500000.0, "max_position_embeddings": 128000}
_NAMES = ModelNames(also=("model.", "model.language_model."))
_DEEPSTACK = [8, 16, 24]
_SECTIONS = [24, 20, 20]
_EXPERTS = EitherExperts(EachExpert(), StackedExperts(transposed=None))
"""Stacks in published files are transposed relative to those that transformers saves."""


def qwen3_vl(config: Mapping[str, Any]) -> Decoder:
    """Frames of videos are images."""
    return _seeing(config, "Qwen3VLForConditionalGeneration", qwen3)


def qwen3_vl_moe(config: Mapping[str, Any]) -> Decoder:
    """Expert weights are always renormalised."""
    return _seeing(config, "Qwen3VLMoeForConditionalGeneration", _with_experts)


def _with_experts(text: Mapping[str, Any]) -> Decoder:
    decoder = qwen3_moe({**text, "norm_topk_prob": True})
    layers = []
    for layer in decoder.spec.layers:
        fed = layer.feed_forward
        fed = replace(fed, tensors=_EXPERTS) if isinstance(fed, MoE) else fed
        layers.append(replace(layer, feed_forward=fed))
    return Decoder(replace(decoder.spec, layers=tuple(layers)))


def _seeing(
    config: Mapping[str, Any], name: str, make: Callable[[Mapping[str, Any]], Decoder]
) -> Decoder:
    text, sections = without_sections({**_DEFAULTS, **text_config(config, {})})
    decoder = make(text)
    decoder = Decoder(replace(decoder.spec, names=_NAMES))
    if not sees_images(config):
        return decoder
    outer = ConfigReader(config, name)
    axes = interleaved_axes(outer, sections, _SECTIONS)
    return with_images(decoder, qwen_tower(outer, _DEEPSTACK), axes, outer)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    config = with_sections(decoder_config(header, SECTIONS, "expert_count"), header)
    if header.integer("expert_count", 0, low=0):
        config |= experts_config(header)
    return config | {"vllmx_deepstack_layers": header.integer("n_deepstack_layers", 0, low=0)}


def _kept(config: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config.get("vision_config") or {}
    layers = vision.get("deepstack_visual_indexes", _DEEPSTACK) if vision else ()
    return {**stated_sections(config, _SECTIONS), "n_deepstack_layers": len(layers or ())}


GGUF = GGUFArchitecture(
    "Qwen3VLForConditionalGeneration",
    {**DECODER_TENSORS, **HEAD_NORM_TENSORS},
    config=_gguf_config,
    kept=_kept,
)
MOE_GGUF = replace(
    GGUF,
    architecture="Qwen3VLMoeForConditionalGeneration",
    tensors={**GGUF.tensors, **EXPERT_TENSORS},
)
