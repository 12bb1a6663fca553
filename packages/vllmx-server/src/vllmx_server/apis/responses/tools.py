"""Tools and tool choices of Responses as those of chats; requested MCP servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from vllmx_core.errors import InvalidRequestError, listing, shown

from vllmx_server.apis.responses.schema import ResponsesRequest
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.tools import ALLOWED, FunctionSpec
from vllmx_server.limits.keys import Holder
from vllmx_server.schema.decode import check_shape

_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a custom tool: models call functions, so its text is the one argument."""


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
    """The name by which models call a function."""
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
    """The input of a custom tool out of the arguments of its function; arguments that cannot be
    read, as those of a call that was cut, are returned as they are."""
    try:
        return msgspec.json.decode(arguments, type=_Input).input
    except (msgspec.DecodeError, UnicodeDecodeError):
        return arguments


class _Input(msgspec.Struct):
    input: str


Choice = str | dict[str, Any] | None
_OURS = ("function", "custom", "namespace", "mcp")
"""Types of tools that the model sees; others are left out."""


class _AllowedTool(msgspec.Struct):
    type: str
    name: str | None = None
    namespace: str | None = None


class _Allowed(msgspec.Struct):
    type: str
    mode: Literal["auto", "required"]
    tools: list[_AllowedTool]


def choice_of(choice: Choice, tools: Sequence[dict[str, Any]] | None) -> Choice:
    """The choice in the form of chats, for a request with these tools. Raises
    InvalidRequestError."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") in ("function", "custom"):
        return _named(choice.get("name"))
    if choice.get("type") != ALLOWED:
        raise field_error(
            "tool_choice",
            f"is of type {shown(str(choice.get('type')))}: this server takes function,"
            f" custom, {ALLOWED} and, of its own MCP servers, mcp",
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
            raise field_error(
                place, f"is of type {shown(tool.type)}, of which the request has no tool"
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


_ADDRESSES = (
    "server_url", "connector_id", "tunnel_id", "authorization", "headers", "url", "command", "args",
    "env", "cwd",
)  # fmt: skip


class _Filter(msgspec.Struct):
    tool_names: list[str]


class _Tool(msgspec.Struct):
    type: str
    server_label: str
    allowed_tools: list[str] | _Filter | None = None
    require_approval: Any = None


class RequestedServer(msgspec.Struct, frozen=True):
    """One server whose tools a request asks for."""

    label: str
    allowed: list[str] | None
    """None: all that the operator allows."""
    param: str


def requested_servers(
    body: ResponsesRequest, names: Sequence[str] | None, holder: Holder
) -> list[RequestedServer]:
    """The servers that a request asks for. Raises InvalidRequestError for what only the operator
    says, and for a server that is not there, and ForbiddenError for one that is not the holder's.

    Args:
        names: of the servers; None: the operator names none.
        holder: of the request's key.
    """
    found: list[RequestedServer] = []
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") == "mcp":
            found.append(_wanted(tool, f"tools[{index}]", names, holder))
            if found[-1].label in (each.label for each in found[:-1]):
                raise field_error(f"tools[{index}].server_label", "is given twice: keep one")
    if found and body.has_logprobs:
        raise InvalidRequestError(
            "log-probabilities cannot be had together with tools of MCP servers: leave out include",
            param="include",
        )
    return found


def _wanted(
    tool: dict[str, Any], place: str, names: Sequence[str] | None, holder: Holder
) -> RequestedServer:
    for field in _ADDRESSES:
        if field in tool:
            raise field_error(
                f"{place}.{field}",
                "is not taken from requests: the operator names MCP servers (--mcp-config); leave"
                " it out and name one of them as server_label",
            )
    check_shape(tool, _Tool, place)
    asked = msgspec.convert(tool, _Tool)
    if names is None:
        raise field_error(
            place,
            'is of type "mcp", but there are no MCP servers here: the operator names them with'
            " --mcp-config",
        )
    holder.check_mcp_server(asked.server_label, f"{place}.server_label")
    if asked.server_label not in names:
        raise field_error(
            f"{place}.server_label",
            f"is {shown(asked.server_label)}, which is not an MCP server here: {listing(names)}",
        )
    if asked.require_approval != "never":
        raise field_error(
            f"{place}.require_approval",
            'must be "never": calls are run without asking; name in allowed_tools which may be',
        )
    allowed = asked.allowed_tools
    if isinstance(allowed, _Filter):
        allowed = allowed.tool_names
    return RequestedServer(asked.server_label, allowed, f"{place}.allowed_tools")
