"""Items of a response about MCP servers, and the calls that they describe.

Servers without tools read such items too, in conversations that began elsewhere, so nothing of
`vllmx_server.mcp` is imported.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from vllmx_server.generating.chat_events import ChatEvent
from vllmx_server.store.ids import new_id

if TYPE_CHECKING:
    from vllmx_server.mcp.offered import OfferedTool
    from vllmx_server.mcp.results import ToolResult


class ToolsListed(msgspec.Struct, frozen=True):
    """A server was asked for its tools."""

    label: str
    tools: list[OfferedTool]
    fault: str | None


class CallDone(msgspec.Struct, frozen=True):
    """A call of this round came to something."""

    number: int
    """The number of the call among those of the round."""
    result: ToolResult


Happening = ChatEvent | ToolsListed | CallDone


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
