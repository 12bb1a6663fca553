"""The arguments of `LLM`: fields of `EngineConfig`, and vLLM's names for them."""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from vllmx_core.config import EngineConfig
from vllmx_core.config_values import convert, nearest
from vllmx_core.errors import ConfigError, shown
from vllmx_core.speculative_config import speculative_config

logger = logging.getLogger("vllmx.llm")

SPECULATION = "speculative_config"
"""vLLM's argument for `speculate` and `speculate_tokens`."""
RENAMED = {
    "gpu_memory_utilization": "memory_fraction",
    "num_gpu_blocks_override": "num_kv_blocks",
}
"""Arguments of vLLM's `LLM` that vllmx calls something else."""
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...] | None] = {
    "trust_remote_code": None,
    "disable_log_stats": None,
    "disable_custom_all_reduce": None,
    "max_seq_len_to_capture": None,
    "compilation_config": None,
    "guided_decoding_backend": None,
    "limit_mm_per_prompt": None,
    "enable_sleep_mode": None,
    "tokenizer_mode": ("auto", "hf"),
    "runner": ("auto", "generate"),
    "swap_space": (0,),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
}
"""Arguments of vLLM's `LLM` that ask for what is done anyway, with the values that do; None: all.
docs/flags.md says why of each."""


def engine_config(model: str, arguments: Mapping[str, Any]) -> EngineConfig:
    """Returns the configuration of `LLM(model, **arguments)`. Raises ConfigError for an unknown
    name, with the nearest one, and for a value of the wrong type or outside its interval."""
    hints = typing.get_type_hints(EngineConfig)
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    values: dict[str, Any] = {"model": model}
    for given, value in _translated(arguments):
        name = RENAMED.get(given, given)
        if name in names:
            if name in values:
                raise ConfigError(f"LLM has {name} twice, as {given} too: give one", param=name)
            plain = json.dumps(value) if isinstance(value, dict) else value
            values[name] = convert(plain, hints[name], name, f"{given} of LLM")
        elif given in WITHOUT_EFFECT:
            _pass_over(given, value, WITHOUT_EFFECT[given])
        else:
            hint = (
                nearest(given, [*names, *RENAMED, SPECULATION])
                or ": it is no field of EngineConfig"
            )
            raise ConfigError(f"LLM takes no argument {given!r}{hint}", param=given)
    return EngineConfig(**values)


def _translated(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments, with the fields that `speculative_config` sets in its place."""
    for name, value in arguments.items():
        if name != SPECULATION:
            yield name, value
        elif isinstance(value, Mapping):
            try:
                yield from speculative_config(value).items()
            except ConfigError as error:
                raise ConfigError(f"{name} of LLM: {error.message}", param=name) from None
        elif value is not None:
            raise ConfigError(f"{name} of LLM must be a dict, got {shown(value)}", param=name)


def _pass_over(name: str, value: Any, taken: tuple[Any, ...] | None) -> None:
    if taken is not None and value not in taken:
        few = " or ".join(map(repr, taken))
        raise ConfigError(
            f"{name} = {shown(value)} of LLM is refused, it may be {few}: leave it out", param=name
        )
    logger.info("%s is taken without effect", name)
