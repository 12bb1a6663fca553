"""The tools of a request for a response with MCP servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.mcp.offered import OfferedTool, called, chosen
from vllmx_server.responses.mcp_wanted import WantedServer
from vllmx_server.responses.tools import functions_of
from vllmx_server.schema.responses import ResponsesRequest


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
