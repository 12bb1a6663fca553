"""The tools of a request for a response with MCP servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.apis.responses.mcp_servers import RequestedServer
from vllmx_server.apis.responses.schema import ResponsesRequest
from vllmx_server.apis.responses.tools import functions_of
from vllmx_server.generating.tools import ALLOWED
from vllmx_server.mcp.offered import OfferedTool, called, chosen


class RequestTools:
    """The tools of a request: those of MCP servers, and the client's own functions.

    Args:
        wanted: servers.
        offered: the tools that each of them has now.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        wanted: Sequence[RequestedServer],
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
        """A `tool_choice` whose tools of servers are named as functions. Raises
        InvalidRequestError."""
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == ALLOWED and isinstance(choice.get("tools"), list):
            named = [each for tool in choice["tools"] for each in self._allowed(tool)]
            return choice | {"tools": named}
        if choice.get("type") != "mcp":
            return choice
        label, name = choice.get("server_label"), choice.get("name")
        for tool in self._of(label):
            if name in (tool.tool, tool.name):
                return _function(tool)
        raise InvalidRequestError(
            f"tool_choice names {shown(name)} of {shown(label)}, which is none of the tools of MCP"
            " servers that the request asks for",
            param="tool_choice",
        )

    def needed_servers(self, choice: str | dict[str, Any] | None) -> list[str]:
        """Servers at least one of which must have tools to meet `choice`."""
        if choice == "required":
            return [] if self._own or self.functions else list(self.of_servers)
        if not isinstance(choice, dict):
            return []
        tools = choice.get("tools") if choice.get("type") == ALLOWED else [choice]
        found = [tool for tool in tools or () if isinstance(tool, dict)]
        labels = [str(tool.get("server_label")) for tool in found if tool.get("type") == "mcp"]
        if len(labels) < len(found) or any(self._of(label) for label in labels):
            return []  # something else may be called
        return labels

    def _allowed(self, tool: Any) -> list[Any]:
        """One tool that a choice allows, or all of a server's."""
        if not isinstance(tool, dict) or tool.get("type") != "mcp":
            return [tool]
        if tool.get("name") is not None:
            return [self.choice(tool)]
        label = str(tool.get("server_label"))
        if label not in self.of_servers:
            raise InvalidRequestError(
                f"tool_choice allows the tools of {shown(label)}, which is none of the MCP servers"
                " that the request asks for",
                param="tool_choice",
            )
        return [_function(each) for each in self._of(label)]

    def _of(self, label: Any) -> Sequence[OfferedTool]:
        return self.of_servers.get(label, ()) if isinstance(label, str) else ()


def _function(tool: OfferedTool) -> dict[str, Any]:
    return {"type": "function", "name": tool.name}
