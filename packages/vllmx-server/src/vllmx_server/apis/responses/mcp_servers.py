"""The MCP servers that a request for a response asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from vllmx_core.errors import InvalidRequestError, listing, shown

from vllmx_server.apis.responses.schema import ResponsesRequest
from vllmx_server.limits.keys import Holder
from vllmx_server.schema.decode import check_shape

_ADDRESSES = (
    "server_url",
    "connector_id",
    "tunnel_id",
    "authorization",
    "headers",
    "url",
    "command",
    "args",
    "env",
    "cwd",
)


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
                raise _wrong(f"tools[{index}].server_label", "is given twice: keep one")
    if found and body.has_logprobs:
        raise InvalidRequestError(
            "log-probabilities are not told beside tools of MCP servers: leave out include",
            param="include",
        )
    return found


def _wanted(
    tool: dict[str, Any], place: str, names: Sequence[str] | None, holder: Holder
) -> RequestedServer:
    for field in _ADDRESSES:
        if field in tool:
            raise _wrong(
                f"{place}.{field}",
                "is not taken from requests: the operator names MCP servers (--mcp-config); leave"
                " it out and name one of them as server_label",
            )
    check_shape(tool, _Tool, place)
    asked = msgspec.convert(tool, _Tool)
    if names is None:
        raise _wrong(
            place,
            'is of type "mcp", but there are no MCP servers here: the operator names them with'
            " --mcp-config",
        )
    holder.check_mcp_server(asked.server_label, f"{place}.server_label")
    if asked.server_label not in names:
        raise _wrong(
            f"{place}.server_label",
            f"is {shown(asked.server_label)}, which is no MCP server here: {listing(names)}",
        )
    if asked.require_approval != "never":
        raise _wrong(
            f"{place}.require_approval",
            'must be "never": calls are run without asking; name in allowed_tools which may be',
        )
    allowed = asked.allowed_tools
    if isinstance(allowed, _Filter):
        allowed = allowed.tool_names
    return RequestedServer(asked.server_label, allowed, f"{place}.allowed_tools")


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {what}", param=param)
