"""The text model within a multimodal config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import UnsupportedModelError, shown

from vllmx_models.trunks.decoder import ModelNames

_OUTER = ("torch_dtype", "dtype", "tie_word_embeddings")
"""Top-level keys that apply to `text_config`."""


def has_text_config(config: Mapping[str, Any]) -> bool:
    """True if the text model is part of a multimodal one."""
    return config.get("text_config") is not None


def text_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config itself, or its `text_config` over `defaults` for keys that it omits."""
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
    """Names of the text model's tensors, as published and (`also`) as transformers saves them."""
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
