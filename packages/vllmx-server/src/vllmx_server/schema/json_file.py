"""Reads JSON files that operators write; a name that appears twice in an object is an error."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from vllmx_core.errors import ConfigError, shown


def read_json_file(path: str | os.PathLike[str], where: str, max_bytes: int, remedy: str) -> Any:
    """The content of a file. Raises ConfigError if it cannot be read, is not JSON, or has a name
    twice in one object.

    Args:
        where: names the file in messages.
        remedy: shown if it cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
            raise OSError("it is not a regular file, and is read more than once")
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read ({error}): {remedy}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{where} is longer than {max_bytes} bytes")
    try:
        return json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"{shown(name)} appears twice")
            names.add(name)
    return found
