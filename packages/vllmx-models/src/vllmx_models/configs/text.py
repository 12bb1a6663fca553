"""The text model inside a config for text and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import UnsupportedModelError, shown

from vllmx_models.trunks.decoder import ModelNames

_OUTER = ("torch_dtype", "dtype", "tie_word_embeddings")
"""Keys that may stand beside `text_config` and hold for it."""


def has_text_config(config: Mapping[str, Any]) -> bool:
    """Whether the text model is a part of a larger one."""
    return config.get("text_config") is not None


def text_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config itself, or its `text_config` over `defaults`, which such configs leave out."""
    if not has_text_config(config):
        return config
    inner = config["text_config"]
    if not isinstance(inner, Mapping):
        raise UnsupportedModelError(
            f"config.json: text_config must be an object, got {shown(inner)}"
        )
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    given = {key: value for key, value in inner.items() if value is not None}
    return {**defaults, **outer, **given}


def inside_images(config: Mapping[str, Any]) -> ModelNames:
    """The names of the text's tensors: in files as they were published, or as transformers writes
    them."""
    if not has_text_config(config):
        return ModelNames()
    prefix = "language_model.model."
    return ModelNames(
        f"{prefix}embed_tokens",
        f"{prefix}layers",
        f"{prefix}norm",
        "language_model.lm_head",
        also=(prefix, "model.language_model."),
    )
