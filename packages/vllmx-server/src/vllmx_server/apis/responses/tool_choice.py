"""What a request for a response says of the tools to call, as a chat completion says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.apis.responses.tools import functions_of, whole_name
from vllmx_server.generating.tools import ALLOWED
from vllmx_server.schema.decode import check_shape

Choice = str | dict[str, Any] | None
_OURS = ("function", "custom", "namespace", "mcp")
"""Types of tools that are told to the model; others are left out of its tools, too."""


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    namespace: str | None = None


class _Allowed(msgspec.Struct):
    type: str
    mode: Literal["auto", "required"]
    tools: list[_Tool]


def choice_of(choice: Choice, tools: Sequence[dict[str, Any]] | None) -> Choice:
    """The choice in the form of chats, beside the request's own tools. Raises
    InvalidRequestError."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") in ("function", "custom"):
        return _named(choice.get("name"))
    if choice.get("type") != ALLOWED:
        raise InvalidRequestError(
            f"tool_choice is of type {shown(str(choice.get('type')))}: this server takes function,"
            f" custom, {ALLOWED} and, of its own MCP servers, mcp",
            param="tool_choice",
        )
    check_shape(choice, _Allowed, "tool_choice")
    wanted = msgspec.convert(choice, _Allowed)
    hosted = {tool.get("type") for tool in tools or ()}.difference(_OURS)
    names: list[str | None] = []
    for index, tool in enumerate(wanted.tools):
        if tool.type in ("function", "custom"):
            names.append(None if tool.name is None else whole_name(tool.name, tool.namespace))
        elif tool.type == "namespace":
            names += _of_namespace(tool.name, tools) or [tool.name]
        elif tool.type not in hosted:
            place = f"tool_choice.tools[{index}]"
            raise InvalidRequestError(
                f"{place} is of type {shown(tool.type)}, of which the request has no tool",
                param=place,
            )
    if not names and wanted.mode == "auto":
        return "none"
    if not names:
        raise InvalidRequestError(
            "tool_choice asks for a call, but of the tools that it allows none is called here:"
            " allow a function",
            param="tool_choice.tools",
        )
    allowed = {"mode": wanted.mode, "tools": [_named(name) for name in names]}
    return {"type": ALLOWED, ALLOWED: allowed}


def _of_namespace(name: str | None, tools: Sequence[dict[str, Any]] | None) -> list[str | None]:
    """Names of the functions in one namespace."""
    of_it = [tool for tool in tools or () if tool.get("type") == "namespace"]
    found = functions_of([tool for tool in of_it if tool.get("name") == name])
    return [each["function"]["name"] for each in found or ()]


def _named(name: str | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
