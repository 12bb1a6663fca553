"""Bounded readers for a model folder's JSON files. The folder is untrusted: sizes are limited,
duplicate keys and malformed text raise typed errors that name the file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllmx_core.errors import ModelNotFoundError, WeightFormatError, excerpt, shown
from vllmx_core.system.files import open_model_file

MIB = 1 << 20
MAX_CONFIG_BYTES = 8 * MIB
MAX_INDEX_BYTES = 128 * MIB


def parse_json_object(text: bytes, source: str) -> dict[str, Any]:
    """A JSON object from UTF-8 bytes.

    Raises:
        WeightFormatError: not UTF-8, not JSON, too deep, a key twice, or not an object.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise WeightFormatError(
            f"{source} is not valid JSON ({excerpt(reason)}): the file is damaged, download it"
            " again"
        ) from error
    if not isinstance(value, dict):
        raise WeightFormatError(
            f"{source} holds a JSON {type(value).__name__} where an object is needed: the file is"
            " damaged, download it again"
        )
    return value


def read_json_object(path: Path, limit_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    """The JSON object in a file, None where there is no such file.

    Raises:
        WeightFormatError: as `parse_json_object`, or the file is larger than `limit_bytes`.
        ModelNotFoundError: it is there but cannot be read.
    """
    text = _read(path, limit_bytes)
    return None if text is None else parse_json_object(text, str(path))


def read_text(path: Path, limit_bytes: int) -> str | None:
    """A file of UTF-8, None where there is no such file. Raises as `read_json_object`."""
    data = _read(path, limit_bytes)
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WeightFormatError(
            f"{path} is not UTF-8 (byte {error.start}): the file is damaged, download it again"
        ) from error


def _read(path: Path, limit_bytes: int) -> bytes | None:
    try:
        with open_model_file(path) as file:
            size = os.fstat(file.fileno()).st_size  # read() allocates all that it is asked for
            text = file.read(min(size, limit_bytes) + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions",
            param="model",
        ) from error
    if len(text) > limit_bytes:
        raise WeightFormatError(
            f"{path} is larger than the {limit_bytes // MIB} MiB allowed for it: use the file of"
            " the original model"
        )
    return text


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {shown(twice)} occurs twice")
    return found
