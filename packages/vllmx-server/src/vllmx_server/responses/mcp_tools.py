"""Tools of MCP servers in Responses: how a request asks for them, and the items that tell of
them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from vllmx_core.errors import InvalidRequestError, listing, shown

from vllmx_server.keys.ring import Holder
from vllmx_server.mcp.offered import OfferedTool, called, chosen
from vllmx_server.mcp.results import ToolResult
from vllmx_server.responses.tools import functions_of
from vllmx_server.schema.decode import check_shape
from vllmx_server.schema.responses import ResponsesRequest
from vllmx_server.store.ids import new_id

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


class _Filter(msgspec.Struct, forbid_unknown_fields=True):
    tool_names: list[str]


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    server_label: str
    allowed_tools: list[str] | _Filter | None = None
    require_approval: Any = None
    server_description: str | None = None


class WantedServer(msgspec.Struct, frozen=True):
    """One server whose tools a request asks for."""

    label: str
    allowed: list[str] | None
    """None: all that the operator allows."""
    param: str


def wanted_servers(
    body: ResponsesRequest, names: Sequence[str] | None, holder: Holder
) -> list[WantedServer]:
    """The servers that a request asks for. Raises InvalidRequestError for what only the operator
    says, and for a server that is not there, and ForbiddenError for one that is not the holder's.

    Args:
        names: of the servers; None: the operator names none.
        holder: of the request's key.
    """
    found: list[WantedServer] = []
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
) -> WantedServer:
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
    return WantedServer(asked.server_label, allowed, f"{place}.allowed_tools")


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {what}", param=param)


class RequestTools:
    """The tools of a request: those of MCP servers, and the client's own functions.

    Args:
        wanted: servers.
        offered: the tools that each of them has now.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        wanted: Sequence[WantedServer],
        offered: Mapping[str, Sequence[OfferedTool]],
    ) -> None:
        self.of_servers = {
            each.label: chosen(offered[each.label], each.allowed, each.param)
            if offered[each.label]
            else []
            for each in wanted
        }
        self._own = {each["function"]["name"] for each in functions_of(body.tools) or ()}

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The servers' tools in the form of chats."""
        return [tool.function for tools in self.of_servers.values() for tool in tools]

    def called(self, name: str) -> OfferedTool | None:
        """The server's tool that the model means; None: the client's, or nobody's."""
        if name in self._own:
            return None
        return called((tool for tools in self.of_servers.values() for tool in tools), name)

    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """A `tool_choice` that names a server's tool, in the form of chats. Raises
        InvalidRequestError."""
        if not isinstance(choice, dict) or choice.get("type") != "mcp":
            return choice
        label, name = choice.get("server_label"), choice.get("name")
        tools = self.of_servers.get(label, ()) if isinstance(label, str) else ()
        for tool in tools:
            if name in (tool.tool, tool.name):
                return {"type": "function", "name": tool.name}
        raise InvalidRequestError(
            f"tool_choice names {shown(name)} of {shown(label)}, which is none of the tools of MCP"
            " servers that the request asks for",
            param="tool_choice",
        )


def listed(label: str, tools: Collection[OfferedTool], fault: str | None) -> dict[str, Any]:
    """The item of a server's tools."""
    return {
        "id": new_id("mcpl_"),
        "type": "mcp_list_tools",
        "server_label": label,
        "tools": [
            {
                "name": tool.tool,
                "description": tool.description or None,
                "input_schema": tool.schema,
                "annotations": tool.annotations,
            }
            for tool in tools
        ],
        "error": fault,
    }


def new_call(tool: OfferedTool) -> dict[str, Any]:
    """The item of a call that begins."""
    return {
        "id": new_id("mcp_"),
        "type": "mcp_call",
        "status": "in_progress",
        "server_label": tool.server,
        "name": tool.tool,
        "arguments": "",
        "output": None,
        "error": None,
        "approval_request_id": None,
    }


def finish_call(item: dict[str, Any], result: ToolResult) -> None:
    """Puts what a call came to into its item."""
    item["status"] = "failed" if result.is_error else "completed"
    if not result.is_error:
        item["output"] = result.text
    elif result.code is not None:
        error = {"type": "mcp_protocol_error", "code": result.code, "message": result.text}
        item["error"] = error
    else:
        content = [{"type": "text", "text": result.text}]
        item["error"] = {"type": "mcp_tool_execution_error", "content": content}


def text_of_error(error: Any) -> str:
    """What the model reads of a call's `error`, which a client may have written."""
    if isinstance(error, dict):
        content = error.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            return "\n".join(text for text in texts if isinstance(text, str))
        error = error.get("message")
    return error if isinstance(error, str) else "the call was not finished"
