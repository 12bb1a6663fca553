"""Sampling defaults of a model: its own, a folder's, or none, and what the operator sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllmx_core.config import EngineConfig
from vllmx_core.config_values import json_object
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_core.sampling import SamplingParams

from vllmx_engine.text.model_files import read_json_object

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Keys that become defaults of requests, beside `max_new_tokens`."""


def generation_config(config: EngineConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """What `RequestBuilder` is to go by; `own` is the checkpoint's. Raises ConfigError."""
    found = dict(own)
    if config.generation_config == "vllm":
        found = {key: value for key, value in own.items() if key == "eos_token_id"}
    elif config.generation_config != "auto":
        path = Path(config.generation_config).expanduser() / "generation_config.json"
        if not path.is_file():
            raise ConfigError(
                f"--generation-config must be auto, vllm or a folder, but {path} does not exist",
                param="generation_config",
            )
        found = read_json_object(path)
    return found | _override(config.override_generation_config)


def _override(text: str | None) -> dict[str, Any]:
    values = json_object(text, "override_generation_config", '{"temperature": 0.7}')
    for name, value in values.items():
        if name not in (*SAMPLING, "max_new_tokens"):
            known = ", ".join((*SAMPLING, "max_new_tokens"))
            raise _refusal(f"has the unknown key {name!r}; known: {known}")
        try:
            SamplingParams(**{name.replace("max_new_tokens", "max_tokens"): value})
        except InvalidRequestError as error:
            raise _refusal(f"has a bad value: {error.message}") from None
    return values


def _refusal(problem: str) -> ConfigError:
    return ConfigError(
        f"--override-generation-config {problem}", param="override_generation_config"
    )
