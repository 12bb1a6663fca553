"""The text models inside configs of models that see images, by their model type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.errors import listing
from vllmx_core.model import Encoder, FeatureSpec

from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import has_text_config, inside_images, text_config
from vllmx_models.families.cohere import cohere2
from vllmx_models.families.gemma import gemma, gemma2
from vllmx_models.families.gpt_oss import gpt_oss
from vllmx_models.families.granite import granite
from vllmx_models.families.llama import llama
from vllmx_models.families.mistral import ministral3, mistral, mixtral
from vllmx_models.families.phi3 import phi3
from vllmx_models.families.qwen import qwen2, qwen3
from vllmx_models.families.qwen_moe import qwen2_moe, qwen3_moe
from vllmx_models.text_types import TEXT_TYPES
from vllmx_models.trunks.decoder import Decoder

Make = Callable[[Mapping[str, Any]], Decoder]
_MAKERS: Mapping[str, Make] = {
    "cohere2": cohere2,
    "gemma": gemma,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "llama": llama,
    "ministral3": ministral3,
    "mistral": mistral,
    "mixtral": mixtral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def inner_text(config: Mapping[str, Any], architecture: str, default: str) -> Decoder:
    """The text model of `text_config`, or one of a GGUF file, whose type `with_tower` adds to its
    config. `default`: the type that configs omit. Raises UnsupportedModelError for another one."""
    apart = has_text_config(config)
    read = ConfigReader(config, architecture).part("text_config") if apart else None
    kind = config.get("vllmx_text_type") if read is None else read.config.get("model_type", default)
    if not isinstance(kind, str) or kind not in _MAKERS:
        read = read or ConfigReader(config, architecture)
        raise read.error("model_type", f"is not a known text model; known: {listing(_MAKERS)}")
    decoder = _MAKERS[kind](text_config(config, TEXT_TYPES.get(kind, {}).get(kind, {})))
    return Decoder(replace(decoder.spec, names=inside_images(config)))


def seeing(text: Decoder, tower: Encoder) -> Decoder:
    """A text model behind a tower."""
    features = FeatureSpec(1, text.spec.hidden_size)
    return Decoder(replace(text.spec, features=features), tower)
