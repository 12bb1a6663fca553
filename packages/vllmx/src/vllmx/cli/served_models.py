"""Several models of one server: `--model NAME=PATH[,key=value...]`, or `models:` in a YAML file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllmx_core.config import EngineConfig
from vllmx_core.config_values import Written, as_text, nearest
from vllmx_core.errors import ConfigError, shown
from vllmx_server.host.models.config import ModelConfig, check_models, with_parts

_ENGINE_KEYS = tuple(field.name for field in dataclasses.fields(EngineConfig))
_KEYS = ("load", "alias", *_ENGINE_KEYS)
_LOADS = ("start", "on-demand")
_FORM = "NAME=PATH[,key=value...]"


def is_one_path(texts: Sequence[str]) -> bool:
    """True if `--model` gives one model, without a served name."""
    if len(texts) != 1:
        return False
    text = texts[0]
    name = text.partition("=")[0]
    return "=" not in text or os.sep in name or Path(text).expanduser().exists()


def served_models(
    texts: Sequence[str],
    entries: Any,
    flags: dict[str, Any],
    configured: Callable[[dict[str, Any]], EngineConfig],
) -> list[ModelConfig]:
    """The models of flags and file, in order.

    Args:
        texts: the values of `--model`.
        entries: `models` of the file, or None.
        flags: the flags of all models.
        configured: makes an engine's configuration from flags.

    Raises:
        ConfigError: a text or an entry does not name a model, or models conflict.
    """
    found = [_of_text(text) for text in texts]
    if entries is not None:
        if not isinstance(entries, list) or not entries:
            raise ConfigError("models in the config file must be a list of models", param="model")
        found += [_of_entry(entry) for entry in entries]
    own: dict[str, float] = {}
    for name, keys in found:
        if "memory_fraction" in keys:
            said = {**flags, "model": keys["model"], "memory_fraction": keys.pop("memory_fraction")}
            own[name] = configured(said).memory_fraction
    models = [_model(name, keys, flags, configured) for name, keys in found]
    check_models(models)
    return with_parts(models, own)


def _of_text(text: str) -> tuple[str, dict[str, Any]]:
    first, *rest = text.split(",")
    name, equals, path = first.partition("=")
    if not (name and equals and path):
        raise ConfigError(
            f"--model {text!r} has no name, which each of several models needs: say {_FORM}",
            param="model",
        )
    keys: dict[str, Any] = {"model": path, "alias": []}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"--model {text!r}: {part!r} is not of the form key=value", param="model"
            )
        _put(keys, key, value, text)
    return name, keys


def _of_entry(entry: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return _of_text(entry)
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(name, str | Written):
        raise ConfigError(
            f"an entry of models in the config file must be {_FORM}, or have name and model, got"
            f" {entry!r}",
            param="model",
        )
    keys: dict[str, Any] = {"alias": []}
    for key, value in entry.items():
        if key != "name":
            _put(keys, str(key), value, as_text(name))
    if "model" not in keys:
        raise ConfigError(f"model {as_text(name)!r} in the config file has no model: name its path")
    return as_text(name), keys


def _put(keys: dict[str, Any], key: str, value: Any, where: str) -> None:
    key = key.replace("-", "_")
    if key in ("alias", "aliases"):
        aliases = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int) and str(each) for each in aliases):
            raise ConfigError(
                f"model {where!r} has {shown(value)} as alias: it must be a name or several",
                param="model",
            )
        keys["alias"] += aliases
    elif key not in _KEYS:
        raise ConfigError(
            f"model {where!r} has the unknown key {key!r}{nearest(key, _KEYS)}", param="model"
        )
    elif key in keys:
        raise ConfigError(f"model {where!r} has the key {key!r} twice: keep one", param="model")
    else:
        keys[key] = value


def _model(
    name: str,
    keys: dict[str, Any],
    flags: dict[str, Any],
    configured: Callable[[dict[str, Any]], EngineConfig],
) -> ModelConfig:
    aliases, load = tuple(map(as_text, keys.pop("alias"))), str(keys.pop("load", "start"))
    if load not in _LOADS:
        raise ConfigError(
            f"model {name!r} has load={load}: it must be {' or '.join(_LOADS)}", param="model"
        )
    engine = configured({**flags, **keys, "served_model_name": name})
    return ModelConfig(engine=engine, aliases=aliases, on_demand=load == "on-demand")
