"""Qwen3.5 and 3.6, dense and with experts, with images and without (Qwen3_5ForCausalLM,
Qwen3_5MoeForCausalLM and the ...ForConditionalGeneration): Qwen3-Next with projections that lie
apart, behind the tower of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.moe import EitherExperts
from vllmx_models.blocks.recurrent import DeltaNames
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import dense_mlp, num_layers
from vllmx_models.configs.text import text_config
from vllmx_models.families.qwen3_next import (
    CONVERTED,
    DEFAULTS,
    DELTA_TENSORS,
    HONOURED,
    LINEAR,
    SHARED_EXPERT_TENSORS,
    delta_config,
    gated_moe,
    prediction,
    qwen_hybrid,
)
from vllmx_models.families.qwen_images import (
    interleaved_axes,
    qwen_tower,
    sees_images,
    with_images,
    without_sections,
)
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.rope import SECTIONS, stated_sections, with_sections
from vllmx_models.trunks.decoder import Decoder, ModelNames

NAMES = ModelNames(also=("model.", "model.language_model."))
"""Published files have the text model in a module next to the vision tower."""
_SECTIONS = [11, 11, 10]


def qwen3_5(config: Mapping[str, Any]) -> Decoder:
    """A dense feed-forward in each layer."""
    read, sections = _read(config, "Qwen3_5ForCausalLM")
    mlps: list[FeedForward] = [dense_mlp(read)] * num_layers(read)
    return _seeing(config, _text(read, mlps), sections)


qwen3_5_text = qwen3_5
"""The text model."""


def qwen3_5_moe(config: Mapping[str, Any]) -> Decoder:
    """Experts in each layer, stored as one tensor or one for each expert."""
    read, sections = _read(config, "Qwen3_5MoeForCausalLM")
    moe = gated_moe(read, tensors=EitherExperts())
    moes: list[FeedForward] = [moe] * num_layers(read)
    return _seeing(config, _text(read, moes), sections)


qwen3_5_moe_text = qwen3_5_moe
"""The text model."""


def _text(read: ConfigReader, feed_forwards: list[FeedForward]) -> Decoder:
    heads = prediction(len(feed_forwards))
    return qwen_hybrid(read, feed_forwards, DeltaNames(), names=NAMES, prediction=heads)


def _seeing(config: Mapping[str, Any], text: Decoder, sections: Any) -> Decoder:
    """Adds the vision tower, if the config has one."""
    if not sees_images(config):
        return text
    outer = ConfigReader(config, "Qwen3_5ForConditionalGeneration")
    axes = interleaved_axes(outer, sections, _SECTIONS)
    return with_images(text, qwen_tower(outer, []), axes, outer)


def _read(config: Mapping[str, Any], architecture: str) -> tuple[ConfigReader, Any]:
    """Returns the text model's config and its multimodal RoPE sections."""
    text, sections = without_sections({**DEFAULTS, **text_config(config, {})})
    read = ConfigReader(text, architecture)
    read.refuse_quirks(*HONOURED)
    if not read.flag("attn_output_gate", True):
        raise read.error("attn_output_gate", "is not known here: true")
    return read, sections


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files order heads so that head h reads key head h % Hk."""
    config = with_sections(delta_config(header, SECTIONS), header)
    return config | {"vllmx_tiled_heads": True}


_TENSORS = {
    **DELTA_TENSORS,
    "blk.{}.ssm_alpha": f"{LINEAR}.in_proj_a",
    "blk.{}.ssm_beta": f"{LINEAR}.in_proj_b",
}
GGUF = GGUFArchitecture(
    "Qwen3_5ForCausalLM",
    _TENSORS,
    config=_gguf_config,
    kept=lambda config: stated_sections(config, _SECTIONS),
    tiled_heads=True,
    **CONVERTED,
)
MOE_GGUF = replace(
    GGUF, architecture="Qwen3_5MoeForCausalLM", tensors={**_TENSORS, **SHARED_EXPERT_TENSORS}
)
