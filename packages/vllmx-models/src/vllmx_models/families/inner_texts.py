"""The text models inside configs of models that see images, by their model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from vllmx_core.errors import listing
from vllmx_core.model import Encoder, FeatureSpec

from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import has_text_config, inside_images, text_config
from vllmx_models.text_types import INNER_TEXTS, TEXT_TYPES
from vllmx_models.trunks.decoder import Decoder


def inner_text(config: Mapping[str, Any], architecture: str, default: str) -> Decoder:
    """The text model of `text_config`, or one of a GGUF file, whose type `with_tower` adds to its
    config. `default`: the type that configs omit. Raises UnsupportedModelError for another one."""
    apart = has_text_config(config)
    read = ConfigReader(config, architecture).part("text_config") if apart else None
    kind = config.get("vllmx_text_type") if read is None else read.config.get("model_type", default)
    if not isinstance(kind, str) or kind not in INNER_TEXTS:
        read = read or ConfigReader(config, architecture)
        raise read.error("model_type", f"is not a known text model; known: {listing(INNER_TEXTS)}")
    module, _, name = INNER_TEXTS[kind].partition(":")
    make = getattr(import_module(f"vllmx_models.families.{module}"), name)
    decoder: Decoder = make(text_config(config, TEXT_TYPES.get(kind, {}).get(kind, {})))
    return Decoder(replace(decoder.spec, names=inside_images(config)))


def seeing(text: Decoder, tower: Encoder) -> Decoder:
    """A text model behind a tower."""
    features = FeatureSpec(1, text.spec.hidden_size)
    return Decoder(replace(text.spec, features=features), tower)
