"""Finds the class of transformers that runs a config.json. No code of a model's folder is ever
imported: what a config says of such is dropped."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import UnsupportedModelError, shown

_DROPPED = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "compression_config",
        "custom_pipelines",
        "distributed_config",
        "experts_implementation",
        "fusion_config",
        "quantization_config",
        "transformers_weights",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a config that are about loading and running, not about the model. Keys that begin with an
underscore are of this kind, too."""
_LENGTHS = ("max_position_embeddings", "max_target_positions", "seq_length", "max_seq_len")
"""The names of the context in configs."""
_ENDLESS = 1 << 15
"""The context of a model that has no longest one, as for a native Mamba."""


def read_config(values: Mapping[str, Any]) -> tuple[Any, type[Any]]:
    """The `PreTrainedConfig` of a parsed config.json and the model class for it. Raises
    UnsupportedModelError where transformers has none that writes text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    model_type, named = _names(values, NAMES)
    kept = {
        key: value
        for key, value in values.items()
        if key not in _DROPPED and key != "model_type" and not key.startswith("_")
    }
    try:
        config = AutoConfig.for_model(model_type, **PreTrainedConfig._decode_special_floats(kept))
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception as error:  # a config's own checks raise anything
        raise refusal(f"config.json of model type {model_type!r}", error) from error
    cls: type[Any] = found[0] if isinstance(found, tuple) else found
    if getattr(cls, "config_class", None) is type(config.get_text_config()):
        config = config.get_text_config()
    if named and cls.__name__ not in named:
        raise UnsupportedModelError(
            f"{', '.join(map(shown, named))} is not what transformers has for text of model type"
            f" {model_type!r}, which is {cls.__name__}"
        )
    return config, cls


def _names(values: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The model type, also of a config that names an architecture alone, and the architectures."""
    listed = values.get("architectures")
    named = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    model_type = values.get("model_type")
    if model_type is None:
        model_type = next((key for key, cls in known.items() if cls in named), None)
    if not isinstance(model_type, str) or model_type not in known:
        import transformers

        wanted = f"model type {shown(model_type)}" if model_type else ", ".join(map(shown, named))
        near = difflib.get_close_matches(str(model_type), known, 1)
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no decoder for"
            f" {wanted or 'a config without architectures'}"
            + (f"; its nearest is {near[0]!r}" if near else "")
        )
    return model_type, named


def refusal(what: str, error: Exception) -> UnsupportedModelError:
    """An error of transformers or torch as one of ours, by its first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return UnsupportedModelError(f"{what}: {type(error).__name__}: {shown(first)}")


def longest_context(config: Any, *, grows: bool = True) -> int:
    """Tokens that the checkpoint claims, or those up to which its positions do not depend on what
    else is in a step. Raises UnsupportedModelError where it says nothing and its cache grows."""
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in _LENGTHS)
    longest = next((one for one in found if isinstance(one, int) and one > 0), 0)
    if not longest and not grows:
        return _ENDLESS
    if not longest:
        raise UnsupportedModelError(
            "config.json has no max_position_embeddings: add the number of tokens that the model"
            " was made for"
        )
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and isinstance(original, int):
            longest = min(longest, original)  # beyond, one long row changes its mates' positions
    return longest


def _ropes(parameters: Any) -> list[Mapping[str, Any]]:
    """The rotary parameters, of each kind of layer where they differ."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return [parameters, *nested]
