"""Keys of a JSON object as flags of their own, as vLLM's parser takes them: `--name.key value`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from vllmx_core.errors import ConfigError

_DOTTED = re.compile(r"(--[A-Za-z][\w-]*|-[a-z]c)\.([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)")


def joined(args: list[str], known: Collection[str]) -> list[str]:
    """The arguments with one JSON object for each flag that was given by its keys. Values are JSON,
    or texts where they are none. Raises ConfigError for a key that is given twice.

    Args:
        known: flags that have a dot in their names.
    """
    rest: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    waiting = iter(args)
    for arg in waiting:
        name, equals, value = arg.partition("=")
        found = None if name in known else _DOTTED.fullmatch(name)
        if found is None:
            rest.append(arg)
            continue
        flag, keys = found[1].replace("_", "-"), found[2].split(".")
        text = value if equals else next(waiting, None)
        if text is None:
            raise ConfigError(f"{name} wants a value")
        _put(objects.setdefault(flag, {}), keys, text, name)
    given = (part for flag, found in objects.items() for part in (flag, json.dumps(found)))
    return [*given, *rest]


def _put(target: dict[str, Any], keys: list[str], text: str, name: str) -> None:
    *outer, last = keys
    for key in outer:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{name} is given twice, as a value and by its keys: give one")
    if last in target:
        raise ConfigError(f"{name} is given twice: give one")
    try:
        target[last] = json.loads(text)
    except (ValueError, RecursionError):
        target[last] = text
