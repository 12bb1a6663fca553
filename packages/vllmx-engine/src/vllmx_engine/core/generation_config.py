"""A model's sampling defaults, from its generation_config.json and from the operator."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllmx_core.config import EngineConfig
from vllmx_core.config_values import json_object
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
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
"""Keys that become defaults of requests, next to `max_new_tokens`."""


def generation_config(config: EngineConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the generation config for `RequestBuilder`; `own` is the checkpoint's. Raises
    ConfigError."""
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


logger = logging.getLogger("vllmx.requests")


_WHOLE = ("top_k", "max_tokens")


def default_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that the model's generation_config.json recommends (what vLLM calls
    `--generation-config auto`); whatever a user names explicitly wins over them. A value that no
    request could have is left out with a warning: it is not the users' mistake."""
    found: dict[str, Any] = {name: generation_config.get(name) for name in SAMPLING}
    found["max_tokens"] = generation_config.get("max_new_tokens")
    params: dict[str, Any] = {}
    for name, value in found.items():
        if value is None:
            continue
        value = _whole(value) if name in _WHOLE else value
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            logger.warning(
                "generation_config.json: %s = %s is left out, the other values are taken: %s",
                name.replace("max_tokens", "max_new_tokens"),
                shown(value),
                error,
            )
        else:
            params[name] = value
    return params


def _whole(value: Any) -> Any:
    """50 for 50.0, which some programs write."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def eos_ids(generation_config: Mapping[str, Any]) -> list[int]:
    """The ids that the checkpoint names. Raises ConfigError."""
    own = generation_config.get("eos_token_id")
    ids = own if isinstance(own, list) else [] if own is None else [own]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(
            "eos_token_id in generation_config.json must be one id or a list of ids, got"
            f" {shown(own)}"
        )
    return ids
