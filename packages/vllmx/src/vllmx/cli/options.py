"""Flags that several commands share, generated from EngineConfig so that none is forgotten.

Precedence is flag > environment variable VLLMX_<NAME> > config file > default, for every option.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from vllmx_core.config import EngineConfig, resolve_config
from vllmx_core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model": ("-m", "--m", "--w", "--f", "--file"),
    "max_num_seqs": ("--batch-size",),
    "num_threads": ("--threads", "-t"),
    "memory_fraction": ("--gpu-memory-utilization",),
    "num_kv_blocks": ("--num-gpu-blocks-override",),
    "kv_cache_memory_bytes": ("--kv-cache-memory",),
    "enable_prefix_caching": ("--context-cache/--no-context-cache",),
    "backend": ("--device", "--d"),
    "step_timeout_s": ("--step-timeout", "--watchdog-timeout"),
}
HELP: Mapping[str, str] = {
    "model": "Folder, file or Hugging Face id; the same as the argument MODEL.",
    "revision": "Branch, tag or commit on the hub.",
    "tokenizer": "Folder with another tokenizer.",
    "chat_template": "File with another chat template.",
    "backend": "Backend by name, or auto: the best that can run here.",
    "load_format": "Weight format by name, or auto.",
    "dtype": "Weights and activations; auto: the checkpoint's.",
    "isq": "Quantise while loading: q8_0, q6_k, q5_k, q4_k, q3_k, q2_k, q4_0, q4_1, q5_0, q5_1,"
    " int8, fp8, or a mix such as q4_k_m.",
    "kv_cache_dtype": "KV cache: auto, bf16, f16, f32, int8 or fp8.",
    "max_model_len": "Longest prompt plus output; default: the model's, up to 1048576 and what"
    " fits.",
    "max_num_seqs": "Sequences that run together; default: 256, on Apple GPUs 8 to 32 by memory.",
    "max_num_batched_tokens": "Token budget of a step.",
    "block_size": "Tokens in a page of the KV cache.",
    "num_kv_blocks": "Pages in the KV cache; default: from free memory.",
    "kv_cache_memory_bytes": "Bytes for the KV cache; default: from free memory.",
    "memory_fraction": "Share of the memory that is free at the start (not of all, as in vLLM) for"
    " weights, buffers and KV cache.",
    "num_threads": "Compute threads; default: the cores that are really available.",
    "enable_prefix_caching": "Share equal prompt prefixes.",
    "enable_chunked_prefill": "Split long prompts over steps.",
    "scheduling_policy": "priority (then fair share, then arrival) or fcfs.",
    "target_step_ms": "Bound on a step's time while others decode; none: no bound.",
    "async_scheduling": "Prepare the next step while one runs.",
    "step_timeout_s": "Seconds after which a step counts as hung and the engine core is started"
    " again; 0: never; default: 300, on CPUs 3600.",
    "enforce_eager": "Run op by op, for debugging.",
    "max_queue": "Requests that may wait; more get 429.",
    "seed": "Seed for requests that bring none.",
    "served_model_name": "Name that clients use.",
}


def options_of(cls: type[Any], help_texts: Mapping[str, str]) -> Callable[[F], F]:
    """A decorator that adds one option for each field of a config dataclass; values that were not
    given arrive as None."""
    hints = typing.get_type_hints(cls)

    def decorate(command: F) -> F:
        for field in reversed(dataclasses.fields(cls)):
            command = _option(field, hints[field.name], help_texts)(command)
        return command

    return decorate


def _option(
    field: dataclasses.Field[Any], hint: Any, help_texts: Mapping[str, str]
) -> Callable[[F], F]:
    flag = "--" + field.name.replace("_", "-")
    text = help_texts[field.name]
    if hint is bool:
        aliases = ALIASES.get(field.name, ())
        names = [f"{flag}/--no-{flag[2:]}", *aliases]
        text += f"  [default: {'yes' if field.default else 'no'}]"
        return click.option(*names, field.name, default=None, help=text)
    if field.default is not None and field.default != ():
        text += f"  [default: {field.default}]"
    names = [flag, *ALIASES.get(field.name, ())]
    multiple = typing.get_origin(hint) is tuple
    return click.option(
        *names, field.name, type=_click_type(hint), default=None, multiple=multiple, help=text
    )


def _click_type(hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        # "none" is a value of optional numbers, so their text is converted later.
        return str if inner in (int, float) else _click_type(inner)
    if origin is Literal:
        return click.Choice(list(typing.get_args(hint)))
    if origin is tuple:
        return _click_type(typing.get_args(hint)[0])
    return hint


def engine_options(command: F) -> F:
    """Every field of EngineConfig as a flag, the argument MODEL, and --config."""
    decorated = options_of(EngineConfig, HELP)(command)
    decorated = click.option(
        "--config", "config_file", type=click.Path(path_type=Path), help="YAML file with flags."
    )(decorated)
    wrapped: F = click.argument("model_argument", metavar="[MODEL]", required=False)(decorated)
    return wrapped


def resolve(classes: tuple[type[Any], ...], flags: dict[str, Any]) -> tuple[Any, ...]:
    """The config records from flags, environment and `--config` file. Raises ConfigError for a key
    of the file that no record has."""
    flags = dict(flags)
    positional = flags.pop("model_argument", None)
    if positional is not None and flags.get("model") is not None:
        raise ConfigError(
            f"the model is named twice, {positional!r} and --model {flags['model']!r}: give one"
        )
    if positional is not None:
        flags["model"] = positional
    flags = {name: value for name, value in flags.items() if value not in (None, ())}
    file = _read_yaml(flags.pop("config_file", None) or os.environ.get("VLLMX_CONFIG"))
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    unknown = [key for key in file if key.replace("-", "_") not in names]
    if unknown:
        raise ConfigError(
            f"the config file has the unknown key {unknown[0]!r}; known are the flags of this"
            " command without their dashes"
        )
    return tuple(
        resolve_config(cls, flags=flags, environment=os.environ, file=_of(cls, file))
        for cls in classes
    )


def _of(cls: type[Any], file: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in file.items() if key.replace("-", "_") in names}


def _read_yaml(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"the config file {path} must hold keys and values, such as port: 8000")
    return content
