"""Tools of a request, and which of them must be called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from vllmx_core.errors import listing, shown
from vllmx_engine.client.chat_options import check_tools as check_definitions

from vllmx_server.generating.fields import field_error
from vllmx_server.schema.decode import check_free_form, check_shape

MAX_TOOLS = 256
ALLOWED = "allowed_tools"
"""The type of a choice of some of the tools."""


class FunctionSpec(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A definition; other keys of it are ignored."""

    function: FunctionSpec
    type: str = "function"


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    type: str
    function: _Named


class _AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class _Allowed(msgspec.Struct):
    type: str
    allowed_tools: _AllowedTools


def tool_list(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as the template takes them: with their keys in the client's order, in which templates
    print them, so that the model reads what the client wrote, without keys that are ignored."""
    return [_as_written(tool) for tool in tools or ()] or None


def _as_written(tool: dict[str, Any]) -> dict[str, Any]:
    known = {name: tool[name] for name in tool if name in Tool.__struct_fields__}
    function = tool["function"]
    names = FunctionSpec.__struct_fields__
    known["function"] = {name: function[name] for name in function if name in names}
    return known if "type" in known else {"type": "function", **known}


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    """Raises InvalidRequestError for definitions that are wrong or nested too deeply, and for
    names that models could not write or tell apart."""
    check_free_form(tools, "tools")
    check_shape(tools or [], list[Tool], "tools")
    if len(tools or ()) > MAX_TOOLS:
        raise field_error("tools", f"has {len(tools or ())} entries, at most {MAX_TOOLS} are taken")
    check_definitions(tools or [])


def forced_tool(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]] | None
) -> str | None:
    """ "required", or the name of the tool that must be called; None where nothing must be. Raises
    InvalidRequestError."""
    if choice in (None, "none", "auto"):
        return None
    if choice != "required" and not isinstance(choice, dict):
        raise field_error(
            "tool_choice",
            f'is {shown(choice)}: it is "auto", "none", "required",'
            ' {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools",'
            ' "allowed_tools": {"mode": ..., "tools": [...]}}',
        )
    names = [tool["function"]["name"] for tool in tools or () if "function" in tool]
    if not names:
        raise field_error("tool_choice", "asks for a call, but there are no tools: give some")
    if not isinstance(choice, dict):
        return "required"
    if choice.get("type") == ALLOWED:
        check_shape(choice, _Allowed, "tool_choice")
        allowed = choice["allowed_tools"]
        for index, each in enumerate(allowed["tools"]):
            _check_named(each, names, f"tool_choice.allowed_tools.tools[{index}]")
        return "required" if allowed["mode"] == "required" else None
    check_shape(choice, _Choice, "tool_choice")
    _check_named(choice, names, "tool_choice")
    return str(choice["function"]["name"])


def _check_named(choice: dict[str, Any], names: list[str], place: str) -> None:
    name = choice["function"]["name"]
    if choice["type"] != "function" or name not in names:
        raise field_error(
            place, f"names {shown(name)}, which is none of the tools: {listing(names)}"
        )


def is_named_tool(choice: str | dict[str, Any] | None) -> bool:
    """True if a checked choice names the one tool that must be called."""
    return isinstance(choice, dict) and choice.get("type") != ALLOWED


def allowed_tools(choice: str | dict[str, Any] | None) -> list[str] | None:
    """Names of the tools that a checked choice allows to be called; None: all."""
    if not isinstance(choice, dict) or choice.get("type") != ALLOWED:
        return None
    return [each["function"]["name"] for each in choice["allowed_tools"]["tools"]]


def no_longer_required(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """A choice once what was to be called has been."""
    if isinstance(choice, dict) and choice.get("type") == ALLOWED:
        return choice | {ALLOWED: choice[ALLOWED] | {"mode": "auto"}}
    return "auto"
