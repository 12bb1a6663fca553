"""Checks definitions of tools, from HTTP and Python alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_core.errors import InvalidRequestError, shown

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_tools(tools: Any) -> None:
    """Raises InvalidRequestError for a malformed definition, and for names that models could not
    write or tell apart."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequestError(
            f"tools is {shown(tools)}: it is a list of definitions", param="tools"
        )
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f'{place} must be {{"type": "function", "function": {{"name": ...,'
                ' "description": ..., "parameters": ...}}',
                param=place,
            )
        if tool.get("type", "function") != "function":
            raise InvalidRequestError(
                f'{place}.type is {shown(tool["type"])}: tools are of type "function"',
                param=f"{place}.type",
            )
        _check_name(function["name"], f"{place}.function.name", seen)
        _check_parameters(function.get("parameters"), f"{place}.function.parameters")


def _check_name(name: str, param: str, seen: set[str]) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{param} is {shown(name)}: a name has 1 to 128 letters, digits and characters of"
            " _-.:/",
            param=param,
        )
    if name in seen:
        raise InvalidRequestError(f"{param} {name!r} is given twice: rename one", param=param)
    seen.add(name)


def _check_parameters(schema: Any, param: str) -> None:
    if schema is not None and not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"{param} is {shown(schema)}: it is a JSON schema of an object", param=param
        )
    kind = (schema or {}).get("type", "object")
    if kind not in ("object", None) and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f"{param} is a schema of type {shown(str(kind))}: arguments are an object", param=param
        )
