"""Converts configuration values: texts of flags and variables, and YAML's types.

Integers may have vLLM's suffixes (2k = 2000, 2K = 2048, 1.5m), bytes also a unit (4GB, 4GiB);
dtypes may have their short names; `auto` lets vllmx choose.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from vllmx_core.dtypes import long_dtype
from vllmx_core.errors import ConfigError, shown

AUTOMATIC = frozenset(
    {
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_kv_blocks",
        "kv_cache_memory_bytes",
        "api_workers",
        "num_threads",
        "step_timeout_s",
    }
)
"""Fields whose None means that vllmx chooses; `auto` and -1 say the same."""

_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_BYTE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_NUMBER = re.compile(r"([+-]?\d{1,20}(?:\.\d{1,9})?) ?([A-Za-z]{0,3})")


class WrittenInt(int):
    """An integer with its spelling in a file, which is not always Python's: 007."""

    text: str


class WrittenFloat(float):
    """A float with its spelling in a file: 1.10."""

    text: str


Written = WrittenInt | WrittenFloat


def written(value: int | float, text: str) -> Written:
    """A number that keeps its spelling."""
    made = WrittenInt(value) if isinstance(value, int) else WrittenFloat(value)
    made.text = text
    return made


def as_text(value: str | int | float) -> str:
    """A text, or a number in its spelling."""
    return value.text if isinstance(value, Written) else str(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" where one of the known names is near, else nothing."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def json_object(text: str | None, name: str, example: str) -> dict[str, Any]:
    """Parses the field `name` as a JSON object; None gives an empty one. Raises ConfigError, which
    shows the example."""
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"{flag} must be a JSON object, such as '{example}', got {shown(text)}", param=name
        )
    return values


def convert(value: Any, hint: Any, name: str, source: str) -> Any:
    """A value of the hinted type for the field `name`; `source` is what the user calls it. Raises
    ConfigError."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        if name in AUTOMATIC and str(value).lower() in ("auto", "-1"):
            return None
        return convert(value, inner[0], name, source)
    if origin is Literal:
        return _choice(value, typing.get_args(hint), name, source)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{source} must be a list, got {value!r}")
        return tuple(convert(item, typing.get_args(hint)[0], name, source) for item in items)
    return _scalar(value, hint, name, source)


def _choice(value: Any, choices: tuple[Any, ...], name: str, source: str) -> Any:
    if name == "dtype" and isinstance(value, str):
        value = long_dtype(value)
    if value in choices:
        return value
    listed = ", ".join(map(str, choices))
    hint = nearest(str(value), map(str, choices))
    raise ConfigError(f"{source} must be one of {listed}, got {value!r}{hint}")


def _scalar(value: Any, hint: Any, name: str, source: str) -> Any:
    if hint is bool:
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise ConfigError(f"{source} must be true or false, got {value!r}")
    if name == "speculate" and value is False:
        return "off"  # YAML reads this word so
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong_type(value, hint, name, source)
    try:
        if hint is str:
            return as_text(value)
        if hint is int:
            return _integer(value, name)
        return hint(value)
    except (ValueError, OverflowError):
        raise _wrong_type(value, hint, name, source) from None


def _counts_bytes(name: str) -> bool:
    return name.endswith("_bytes") or name in ("kv_host_memory", "kv_disk_size")


def _integer(value: str | int | float, name: str) -> int:
    """Raises ValueError unless the value is a whole number."""
    if isinstance(value, str):
        found = _NUMBER.fullmatch(value.strip())
        if found is None:
            raise ValueError
        digits, unit = found.groups()
        factor = _SUFFIXES.get(unit)
        if factor is None and _counts_bytes(name):
            factor = _BYTE_UNITS.get(unit.lower())
        if factor is None:
            raise ValueError
        if "." not in digits:
            return int(digits) * factor
        value = float(digits) * factor
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def _wrong_type(value: Any, hint: Any, name: str, source: str) -> ConfigError:
    wanted = {int: "an integer", float: "a number", str: "a text"}[hint]
    if _counts_bytes(name):
        wanted = "a number of bytes, such as 4GiB"
    return ConfigError(f"{source} must be {wanted}, got {value!r}")
