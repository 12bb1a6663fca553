"""What the model's generation_config.json sets for requests that do not say it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.sampling import SamplingParams

from vllmx_engine.core.generation_config import SAMPLING

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
