"""Engine configuration: one frozen record, filled with flag > environment > YAML > default."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllmx_core.errors import ConfigError

DEMO_MODEL = "demo"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides how a model is loaded and scheduled. Names are vLLM's where it has
    one; None: chosen from the model and the memory."""

    model: str = DEMO_MODEL
    """A folder, a file, a Hugging Face id, or "demo" for the built-in model."""
    revision: str | None = None
    tokenizer: str | None = None
    """A folder with another tokenizer; None: the model's own."""
    chat_template: str | None = None
    """A template file that replaces the model's own."""
    backend: str = "auto"
    load_format: str = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = "auto"
    isq: str | None = None
    """Quantise the checkpoint to this type while it loads: q4_k_m, q8_0, int8, ..."""
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """Sequences that run together; None: by the backend, 256 or what suits the device."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None: 2048, or less on slow backends."""
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_fraction: float = 0.9
    """Share of the memory that is free when loading begins, of the device or else of the host, for
    weights, buffers and KV cache together. Not a share of all memory, as in vLLM and SGLang: what
    others hold is never counted on, and a CPU's memory is nobody's alone."""
    num_threads: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["priority", "fcfs"] = "priority"
    target_step_ms: float | None = 100.0
    """Prefill chunks are sized so that a step with running decodes stays under this; None: the
    token budget alone decides."""
    async_scheduling: bool = True
    """Prepare step n + 1 while step n runs."""
    enforce_eager: bool = False
    step_timeout_s: float | None = None
    """A step that takes longer counts as hung, and the engine core as lost; 0: never. None: by the
    backend, see `LoadedInfo.step_timeout_s`."""
    max_queue: int = 1024
    """Requests that may wait; more are refused with 429."""
    seed: int | None = None
    """Seeds requests that bring none, so that a whole run repeats."""
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_model_len", 1, 1 << 31),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("num_kv_blocks", 1, 1 << 31),
            ("num_threads", 1, 1024),
            ("max_queue", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(
                    f"{_flag(name)} must be between {low} and {high}, got {value}", param=name
                )
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(
                f"--block-size must be 8, 16, 32, 64 or 128, got {self.block_size}",
                param="block_size",
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(
                f"--memory-fraction must be above 0 and at most 1, got {self.memory_fraction}",
                param="memory_fraction",
            )
        timeout = self.step_timeout_s
        if timeout is not None and not 0 <= timeout <= 1e6:
            raise ConfigError(
                f"--step-timeout-s must be between 0 (off) and 1000000, got {timeout}",
                param="step_timeout_s",
            )
        target = self.target_step_ms
        if target is not None and not (math.isfinite(target) and target > 0):
            raise ConfigError(
                f"--target-step-ms must be above 0 or none, got {target}", param="target_step_ms"
            )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model


def resolve_config(
    cls: type[Any],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any],
) -> Any:
    """Fills the dataclass `cls`: flags that are not None, then `VLLMX_<NAME>` variables, then keys
    of the config file (dashes or underscores), then defaults. A file that serves several records
    is split by the caller. Raises ConfigError that names the source for an unknown or doubled key
    of the file and for a value of the wrong type; flags of other records are passed over."""
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in file.items():
        name = _file_key(key, fields)
        if name in values:
            raise ConfigError(
                f"config file key {key!r} is there twice, with - and with _: keep one"
            )
        values[name] = _convert(value, hints[name], f"config file key {key!r}")
    for name in fields:
        text = environment.get(f"VLLMX_{name.upper()}")
        if text is not None:
            values[name] = _convert(text, hints[name], f"environment variable VLLMX_{name.upper()}")
    for name, value in flags.items():
        if name in fields and value is not None:
            values[name] = _convert(value, hints[name], _flag(name))
    return cls(**values)


def _file_key(key: Any, fields: Collection[str]) -> str:
    """The field that a key of the config file means."""
    name = str(key).replace("-", "_")
    if name not in fields:
        near = difflib.get_close_matches(name, fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(fields))}"
        raise ConfigError(f"unknown config file key {key!r}; {hint}")
    return name


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _convert(value: Any, hint: Any, source: str) -> Any:
    """A value of the hinted type from text or YAML."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        return _convert(value, inner[0], source)
    if origin is Literal:
        if value not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise ConfigError(f"{source} must be one of {choices}, got {value!r}")
        return value
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{source} must be a list, got {value!r}")
        return tuple(_convert(item, typing.get_args(hint)[0], source) for item in items)
    return _scalar(value, hint, source)


def _scalar(value: Any, hint: Any, source: str) -> Any:
    if hint is bool:
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise ConfigError(f"{source} must be true or false, got {value!r}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong_type(value, hint, source)
    try:
        if hint is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        return hint(value)
    except ValueError:
        raise _wrong_type(value, hint, source) from None


def _wrong_type(value: Any, hint: Any, source: str) -> ConfigError:
    wanted = {int: "an integer", float: "a number", str: "a text"}[hint]
    return ConfigError(f"{source} must be {wanted}, got {value!r}")
