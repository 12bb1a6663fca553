"""Tools of MCP servers in `vllmx chat`: rounds of calls, until the model answers without any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import ConfigError, excerpt

from vllmx.terminal.rounds import Aside

if TYPE_CHECKING:
    from vllmx_engine.wire.outputs import ToolCall
    from vllmx_server.mcp.offered import OfferedTool, ToolResult
    from vllmx_server.mcp.servers import ToolServers

MAX_ROUNDS = 16
MAX_TOOLS = 256
_SHOWN = 300


class ChatTools:
    """The tools that the model may call.

    Args:
        servers: already started.

    Attributes:
        is_on: False while the user keeps them from the model.
    """

    def __init__(self, servers: ToolServers) -> None:
        self._servers = servers
        self.is_on = True

    def wait(self) -> list[str]:
        """Waits until each server has started or failed; returns a line for each failure. Raises
        ConfigError for too many tools."""
        for name in self._servers.names:
            self._servers.settled(name).result()
        count = len(self._tools())
        if count > MAX_TOOLS:
            raise ConfigError(
                f"the MCP servers have {count} tools, at most {MAX_TOOLS} are given to a"
                " model: name those that matter as allowedTools"
            )
        faults = {name: self._servers.fault(name) for name in self._servers.names}
        return [f"MCP server {name}: {fault}" for name, fault in faults.items() if fault]

    def functions(self) -> list[dict[str, Any]]:
        """The tools as templates and APIs have them; empty while they are off."""
        return [tool.function for tool in self._tools()] if self.is_on else []

    def listed(self) -> str:
        """A line for each tool."""
        lines = (f"{tool.name}  {tool.description}" for tool in self._tools())
        return "\n".join((*lines, "/tools off keeps them from the model" if self.is_on else "off"))

    def _tools(self) -> list[OfferedTool]:
        """The tools of all servers that can be called now."""
        return [tool for name in self._servers.names for tool in self._servers.tools(name)]

    def results(self, calls: list[ToolCall]) -> Iterator[tuple[ToolCall, ToolResult]]:
        """Runs calls concurrently and yields their results. Ctrl-C ends them."""
        from vllmx_server.mcp.offered import REFUSED, called, failure

        tools = self._tools()
        running: list[Future[ToolResult]] = []
        for call in calls:
            if (tool := called(tools, call.name)) is not None:
                running.append(self._servers.call(tool, call.arguments))
                continue
            refused: Future[ToolResult] = Future()
            refused.set_result(failure(f"there is no tool {excerpt(call.name, 100)}", REFUSED))
            running.append(refused)
        try:
            for call, result in zip(calls, running, strict=True):
                yield call, result.result()
        finally:
            for result in running:
                result.cancel()


def call_message(content: str, calls: list[ToolCall]) -> dict[str, Any]:
    """A turn of the model that ends with calls."""
    written = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": _decoded(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


def result_message(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    """The result of a call as a message to the model."""
    return {
        "role": "tool",
        "content": result.text,
        "name": call.name,
        "tool_call_id": call.id,
    }


def shown_call(call: ToolCall) -> Aside:
    """A line for people."""
    return Aside(f"\n> {call.name} {excerpt(call.arguments, _SHOWN)}\n")


def shown_result(result: ToolResult) -> Aside:
    """A line for people."""
    sign = "!" if result.is_error else "<"
    return Aside(f"{sign} {excerpt(' '.join(result.text.split()), _SHOWN)}\n")


def _decoded(arguments: str) -> dict[str, Any] | str:
    """The arguments as an object, which most templates want."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
