"""Keys of a JSON object as flags of their own, as vLLM's parser takes them: `--name.key value`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from typing import Any

from vllmx_core.errors import ConfigError

logger = logging.getLogger("vllmx.flags")
_DOTTED = re.compile(r"(--[A-Za-z][\w-]*|-[a-z]c)\.([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)")


def joined(args: list[str], known: Collection[str]) -> list[str]:
    """The arguments with one JSON object for each flag that was given by its keys, in the place of
    the last of them. Values are JSON, or texts where they are none. Of a key that is given twice
    the last value is taken, with a warning. Raises ConfigError for a key without a value.

    Args:
        known: flags that have a dot in their names.
    """
    rest: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
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
        places[flag] = len(rest)
    for flag, place in sorted(places.items(), key=lambda item: -item[1]):
        rest[place:place] = [flag, json.dumps(objects[flag])]
    return rest


def _put(target: dict[str, Any], keys: list[str], text: str, name: str) -> None:
    *outer, last = keys
    for key in outer:
        if not isinstance(target.setdefault(key, {}), dict):
            logger.warning("%s is given twice, as a value before: its keys are taken", name)
            target[key] = {}
        target = target[key]
    if last in target:
        logger.warning("%s is given twice, the last one is taken", name)
    try:
        target[last] = json.loads(text)
    except (ValueError, RecursionError):
        target[last] = text
