"""GET /v1/mcp/servers and POST /v1/mcp/call: clients of other APIs run tools of MCP servers."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import listing, shown

from vllmx_server.apis.responses.store import KeptResponses
from vllmx_server.errors import ForbiddenError
from vllmx_server.generating.api import keyed
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.reading import counted, read_json
from vllmx_server.generating.served import served_of
from vllmx_server.http.disconnect import while_there
from vllmx_server.http.operation import BODY, STATUS, TEXT
from vllmx_server.http.pages import answer
from vllmx_server.schema.decode import decode
from vllmx_server.schema.record import Record

if TYPE_CHECKING:
    from vllmx_server.mcp.offered import ToolResult


class ToolCallRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of one tool."""

    server_label: str
    name: str
    """The server's name of the tool, or the name that models see."""
    arguments: dict[str, Any] = {}


class ServerTools(Record, kw_only=True):
    """An MCP server that the key may use."""

    server_label: str
    tools: list[dict[str, Any]]
    """The tools in the form of `tools` of a chat."""
    error: str | None
    """Why the server cannot be called."""


class ServerList(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ServerTools]


class ToolOutput(Record, kw_only=True):
    output: str
    """The text that a model reads."""
    is_error: bool


async def list_servers(request: Request) -> Response:
    """The MCP servers of `--mcp-config` that the key may use, with their tools as functions."""
    served = served_of(request)
    servers, holder = served.store(KeptResponses).tool_servers, served.holder(request)
    if servers is None:
        return answer(ServerList(data=[]))
    found = []
    for label in servers.names:
        try:
            holder.check_mcp_server(label, "server_label")
        except ForbiddenError:
            continue
        functions = [tool.function for tool in servers.tools(label)]
        found.append(ServerTools(server_label=label, tools=functions, error=servers.fault(label)))
    return answer(ServerList(data=found))


async def call_tool(request: Request) -> Response:
    """Calls a tool and returns the text of its result. A client that disconnects cancels the call.

    Raises:
        ForbiddenError: the key may not use the server.
        InvalidRequestError: there is no such server or tool.
    """
    served = served_of(request)
    body = await read_json(request, served, lambda data: decode(data, _CALL))
    servers = served.store(KeptResponses).tool_servers
    served.holder(request).check_mcp_server(body.server_label, "server_label")
    labels = () if servers is None else servers.names
    if servers is None or body.server_label not in labels:
        raise field_error(
            "server_label",
            f"is {shown(body.server_label)}, and the MCP servers are: {listing(labels) or 'none'}",
        )
    tools = servers.tools(body.server_label)
    for tool in tools:
        if body.name in (tool.name, tool.tool):
            break
    else:
        names = listing([tool.tool for tool in tools]) or "none"
        raise field_error("name", f"is {shown(body.name)}, and the server's tools are: {names}")
    async with counted(request):
        arguments = msgspec.json.encode(body.arguments).decode()
        result = await while_there(request.receive, _called(servers.call(tool, arguments)))
    return answer(ToolOutput(output=result.text, is_error=result.is_error))


async def _called(calling: Future[ToolResult]) -> ToolResult:
    return await asyncio.wrap_future(calling)


_CALL = msgspec.json.Decoder(ToolCallRequest)

ROUTES = (
    keyed("GET", "/v1/mcp/servers", list_servers, STATUS, ServerList),
    keyed(
        "POST",
        "/v1/mcp/call",
        call_tool,
        TEXT,
        ToolOutput,
        ToolCallRequest,
        statuses=BODY,
        example={"server_label": "weather", "name": "get_weather", "arguments": {"city": "Paris"}},
        text="Errors of the tool are results with `is_error`.",
    ),
)
