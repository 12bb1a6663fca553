"""Tools of Responses as functions of chats, and calls of those functions as its items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from vllmx_server.generating.tools import FunctionSpec
from vllmx_server.schema.decode import check_shape

_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What a custom tool takes: models call functions, so its text is the one argument."""


class _Format(msgspec.Struct):
    type: str = "text"
    definition: str | None = None


class _Custom(msgspec.Struct):
    type: str
    name: str
    description: str | None = None
    format: _Format | None = None


class _Namespace(msgspec.Struct):
    name: str
    tools: list[dict[str, Any]]


def functions_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions, custom tools and those of namespaces; tools that OpenAI's servers run are left
    out. Raises InvalidRequestError."""
    found = [{"type": "function", "function": spec} for spec in _specs(tools or (), "tools", None)]
    return found or None


def _specs(tools: Any, where: str, namespace: str | None) -> Iterator[dict[str, Any]]:
    for index, tool in enumerate(tools):
        place, kind = f"{where}[{index}]", tool.get("type")
        if kind == "function":
            fields = ("name", "description", "parameters", "strict")
            spec = {field: tool[field] for field in fields if tool.get(field) is not None}
            check_shape(spec, FunctionSpec, place)
            yield spec | {"name": whole_name(spec["name"], namespace)}
        elif kind == "custom":
            check_shape(tool, _Custom, place)
            yield _as_function(msgspec.convert(tool, _Custom), namespace)
        elif kind == "namespace" and namespace is None:
            check_shape(tool, _Namespace, place)
            yield from _specs(tool["tools"], f"{place}.tools", tool["name"])


def _as_function(tool: _Custom, namespace: str | None) -> dict[str, Any]:
    told = [tool.description] if tool.description else []
    if tool.format is not None and tool.format.definition is not None:
        told.append(f"The input follows this grammar:\n{tool.format.definition}")
    name = whole_name(tool.name, namespace)
    return {"name": name, "description": "\n\n".join(told), "parameters": _FREE_FORM}


def whole_name(name: str, namespace: str | None) -> str:
    """What models call a function."""
    return name if namespace is None else f"{namespace}.{name}"


class ToolForm(msgspec.Struct, frozen=True):
    """The form of a tool's calls in items and events."""

    name: str
    is_custom: bool = False
    namespace: str | None = None


def forms_of(tools: list[dict[str, Any]] | None) -> dict[str, ToolForm]:
    """Tools that are not plain functions, by what models call them. The tools have been checked."""
    found: dict[str, ToolForm] = {}
    for tool in tools or ():
        namespace = tool["name"] if tool.get("type") == "namespace" else None
        for one in [tool] if namespace is None else tool["tools"]:
            is_custom = one.get("type") == "custom"
            if is_custom or (namespace is not None and one.get("type") == "function"):
                name = one["name"]
                found[whole_name(name, namespace)] = ToolForm(name, is_custom, namespace)
    return found


def free_form(arguments: str) -> str:
    """The input of a custom tool out of the arguments of its function; what is no such object, as
    of a call that was cut, is given as it stands."""
    try:
        return msgspec.json.decode(arguments, type=_Input).input
    except (msgspec.DecodeError, UnicodeDecodeError):
        return arguments


class _Input(msgspec.Struct):
    input: str
