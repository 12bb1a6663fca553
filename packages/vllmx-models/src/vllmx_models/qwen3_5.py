"""Qwen3.5 and 3.6, dense and with experts, and the text of their models with images
(Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM and the ...ForConditionalGeneration): Qwen3-Next with
projections that lie apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.moe import EitherExperts
from vllmx_models.blocks.recurrent import DeltaNames
from vllmx_models.config import ConfigReader
from vllmx_models.decoder import Decoder, ModelNames
from vllmx_models.decoder_config import dense_mlp, num_layers
from vllmx_models.gguf.architecture import GGUFArchitecture
from vllmx_models.gguf.hyperparameters import GGUFHeader
from vllmx_models.qwen3_next import (
    CONVERTED,
    DEFAULTS,
    DELTA_TENSORS,
    HONOURED,
    LINEAR,
    SHARED_EXPERT_TENSORS,
    delta_config,
    gated_moe,
    qwen_hybrid,
)
from vllmx_models.text_config import has_text_config, text_config

logger = logging.getLogger("vllmx.models")
NAMES = ModelNames(also=("model.", "model.language_model."))
"""Published files have the text beside the part for images, in a module of its own."""


def qwen3_5(config: Mapping[str, Any]) -> Decoder:
    """A dense feed-forward in each layer."""
    read = _read(config, "Qwen3_5ForCausalLM")
    return qwen_hybrid(read, [dense_mlp(read)] * num_layers(read), DeltaNames(), names=NAMES)


qwen3_5_text = qwen3_5
"""The text model alone."""


def qwen3_5_moe(config: Mapping[str, Any]) -> Decoder:
    """Experts in each layer, as one tensor or as one for each."""
    read = _read(config, "Qwen3_5MoeForCausalLM")
    moe = gated_moe(read, tensors=EitherExperts())
    return qwen_hybrid(read, [moe] * num_layers(read), DeltaNames(), names=NAMES)


qwen3_5_moe_text = qwen3_5_moe
"""The text model alone."""


def _read(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    if has_text_config(config):
        logger.info("%s: text is served, the part of the model for images is not", architecture)
    read = ConfigReader(_of_text({**DEFAULTS, **text_config(config, {})}), architecture)
    read.refuse_quirks(*HONOURED)
    if not read.flag("attn_output_gate", True):
        raise read.error("attn_output_gate", "is not known here: true")
    return read


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what the rotation says of images: the three positions of a token of text are one."""
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return config
    kept = {key: value for key, value in given.items() if not key.startswith("mrope_")}
    return {**config, "rope_parameters": kept}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Heads lie so that head h reads key head h % Hk."""
    return delta_config(header, "rope.dimension_sections") | {"vllmx_tiled_heads": True}


_TENSORS = {
    **DELTA_TENSORS,
    "blk.{}.ssm_alpha": f"{LINEAR}.in_proj_a",
    "blk.{}.ssm_beta": f"{LINEAR}.in_proj_b",
}
GGUF = GGUFArchitecture("Qwen3_5ForCausalLM", _TENSORS, config=_gguf_config, **CONVERTED)
GGUF_MOE = replace(
    GGUF, architecture="Qwen3_5MoeForCausalLM", tensors={**_TENSORS, **SHARED_EXPERT_TENSORS}
)
