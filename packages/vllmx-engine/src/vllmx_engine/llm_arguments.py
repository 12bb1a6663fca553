"""What `LLM` takes beside the model: fields of `EngineConfig`, and vLLM's names for them."""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Mapping
from typing import Any

from vllmx_core.config import EngineConfig
from vllmx_core.config_values import convert, nearest
from vllmx_core.errors import ConfigError, shown

log = logging.getLogger("vllmx.llm")

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
    """The configuration that `LLM(model, **arguments)` asks for. Raises ConfigError for a name that
    is no field, with the nearest, and for a value of the wrong type or outside of its interval."""
    hints = typing.get_type_hints(EngineConfig)
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    values: dict[str, Any] = {"model": model}
    for given, value in arguments.items():
        name = RENAMED.get(given, given)
        if name in names:
            if name in values:
                raise ConfigError(f"LLM has {name} twice, as {given} too: give one", param=name)
            plain = json.dumps(value) if isinstance(value, dict) else value
            values[name] = convert(plain, hints[name], name, f"{given} of LLM")
        elif given in WITHOUT_EFFECT:
            _pass_over(given, value, WITHOUT_EFFECT[given])
        else:
            hint = nearest(given, [*names, *RENAMED]) or ": it is no field of EngineConfig"
            raise ConfigError(f"LLM takes no argument {given!r}{hint}", param=given)
    return EngineConfig(**values)


def _pass_over(name: str, value: Any, taken: tuple[Any, ...] | None) -> None:
    if taken is not None and value not in taken:
        few = " or ".join(map(repr, taken))
        raise ConfigError(
            f"{name} = {shown(value)} of LLM is refused, it may be {few}: leave it out", param=name
        )
    log.info("%s is taken without effect", name)
