"""Translates how vLLM and llama.cpp name speculation into `EngineConfig`'s fields.

The command line reads `--speculative-config` and llama.cpp's flags with it, and `LLM` the argument
`speculative_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.config import MAX_DRAFT
from vllmx_core.config_values import json_object, nearest
from vllmx_core.errors import ConfigError, shown

_DRAFTERS = {
    "none": "off",
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "suffix",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "ngram-map-k4v": "suffix",
    "ngram-mod": "suffix",
    "ngram-cache": "suffix",
}
"""Our names of vLLM's methods and llama.cpp's types."""
_OF_MODELS = ("draft_model", "eagle3", "dflash")
"""vLLM's methods that are models; config.json says which."""
_OF_FILES = ("draft", "draft-simple", "draft-eagle3", "draft-dflash")
"""llama.cpp's types of the same."""
_OF_ASSISTANTS = ("mtp", "gemma4_mtp")
"""vLLM's methods that may name a model, an assistant; without one they mean the target's heads."""
_KEYS = ("method", "model", "num_speculative_tokens")
_ONLY: Mapping[str, tuple[object, ...]] = {
    "disable_logprobs": (False,),
    "draft_tensor_parallel_size": (1,),
    "parallel_drafting": (False,),
    "rejection_sample_method": ("strict", "standard", "probabilistic", "block"),
}
"""Keys whose only accepted values ask for what is done anyway."""
_ANY = frozenset(
    ("prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size", "draft_sample_method",
     "disable_padded_drafter_batch", "suffix_decoding_max_tree_depth",
     "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
     "suffix_decoding_min_token_prob")
)  # fmt: skip
"""Keys without effect."""


def drafter(text: str) -> str | None:
    """The drafter of a method's name; None: the draft model says it. Raises ConfigError."""
    if text in _OF_MODELS or text in _OF_FILES:
        return None
    if text == "mtp" or text.endswith(("_mtp", "-mtp")):  # vLLM has one for each architecture
        return "heads"
    if text not in _DRAFTERS:
        known = ", ".join((*_DRAFTERS, "mtp", *_OF_MODELS))
        raise ConfigError(f"{known} are taken, other drafters are not served yet")
    return _DRAFTERS[text]


def draft_model(text: str) -> str:
    """The drafter that is a model of its own."""
    return f"model:{text}"


def draft_tokens(text: str) -> str:
    """Cuts the number to what a step verifies; 0 leaves it to us. Raises ConfigError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(f"a number of draft tokens must be 0 or above, got {shown(text)}")
    return "auto" if int(text) == 0 else str(min(int(text), MAX_DRAFT))


def speculative_config(given: str | Mapping[str, Any]) -> dict[str, str]:
    """The fields `speculate` and `speculate_tokens` that vLLM's object, or its JSON, sets. Raises
    ConfigError."""
    example = '{"method": "ngram"}'
    config = json_object(given, "speculative_config", example) if isinstance(given, str) else given
    for key, value in config.items():
        if key in _KEYS or key in _ANY or value is None:
            continue
        if key not in _ONLY:
            raise ConfigError(
                f"its key {shown(key)} is not served{nearest(key, (*_KEYS, *_ONLY, *_ANY))}"
            )
        if value not in _ONLY[key]:
            few = " or ".join(map(str, _ONLY[key]))
            raise ConfigError(f"its {key} may be {few}, got {shown(value)}: leave it out")
    model, method = config.get("model"), config.get("method")
    if method is None and model in ("ngram", "[ngram]"):
        model, method = None, "ngram"
    found = {"speculate": "auto"}
    ours = None if method is None else drafter(str(method))
    if ours is not None and not (model is not None and method in _OF_ASSISTANTS):
        found["speculate"] = ours
    elif model is not None:
        found["speculate"] = draft_model(str(model))
    elif method is not None:
        raise ConfigError(f"the method {method} wants the draft model: add the key 'model'")
    tokens = config.get("num_speculative_tokens")
    if tokens is not None:
        found["speculate_tokens"] = draft_tokens(str(tokens))
    return found
