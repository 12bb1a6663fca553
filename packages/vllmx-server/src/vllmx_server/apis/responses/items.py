"""Items of responses and conversations: ids, forms in the API, summaries, calls of MCP tools."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vllmx_server.apis.responses.schema import InputItem, InputPart
from vllmx_server.generating.chat_events import ChatEvent
from vllmx_server.generating.fields import field_error
from vllmx_server.store.database import new_id

if TYPE_CHECKING:
    from vllmx_server.mcp.offered import OfferedTool, ToolResult


_PREFIXES = {
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    "mcp_call": "mcp_",
    "mcp_list_tools": "mcpl_",
    "compaction": "cmp_",
}
_WITHOUT_STATUS = ("mcp_list_tools", "compaction")


def new_item_id(item: InputItem) -> str:
    """An id with the prefix of the item's type."""
    return new_id(_PREFIXES.get(item.type or "", "msg_"))


def named(items: Sequence[InputItem]) -> list[InputItem]:
    """The items, each with an id and a type."""
    return [
        msgspec.structs.replace(item, id=item.id or new_item_id(item), type=item.type or "message")
        for item in items
    ]


def shown(item: InputItem) -> dict[str, object]:
    """An item as the API lists it, with every field that clients rely on."""
    found: dict[str, object] = msgspec.to_builtins(item)
    kind = "output_text" if item.role == "assistant" else "input_text"
    if item.type not in _WITHOUT_STATUS:
        found.setdefault("status", "completed")
    if item.type == "message":
        content = [InputPart(kind, text=item.content)] if isinstance(item.content, str) else None
        found["content"] = [_part(part) for part in content or _parts(item.content)]
    elif item.type == "reasoning":
        found["content"] = [_part(part) for part in _parts(item.content)]
        found["summary"] = [_part(part) for part in item.summary or ()]
    elif isinstance(item.output, list):
        found["output"] = [_part(part) for part in item.output]
    return found


def _parts(content: str | list[InputPart] | None) -> list[InputPart]:
    return content if isinstance(content, list) else []


def _part(part: InputPart) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(part)
    found = {name: value for name, value in fields.items() if value is not None}
    if part.type == "output_text":
        found.setdefault("annotations", [])
    return found


_PREFIX = "vllmx1."
"""Marks the content of our own items. Content is encoded, not secret: the client has the
conversation."""


def item_of(summary: str) -> dict[str, str]:
    """The item that holds a summary."""
    content = base64.urlsafe_b64encode(summary.encode()).decode()
    return {"type": "compaction", "id": new_id("cmp_"), "encrypted_content": _PREFIX + content}


def summary_of(item: InputItem, where: str) -> str:
    """The summary that an item holds. Raises InvalidRequestError for one that was not made here."""
    prefix, content = _PREFIX, item.encrypted_content or ""
    try:
        if content.startswith(prefix):
            return base64.b64decode(content.removeprefix(prefix), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise field_error(
        f"{where}.encrypted_content",
        "was not made by POST /v1/responses/compact of this server: send"
        " the item as it was, or the conversation itself",
    )


class ToolsListed(msgspec.Struct, frozen=True):
    """A server was asked for its tools."""

    label: str
    tools: list[OfferedTool]
    fault: str | None


class CallDone(msgspec.Struct, frozen=True):
    """A call of this round has ended."""

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
    """Puts the result of a call into its item."""
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
    """The text that the model reads for a call's `error`, which a client may have written."""
    if isinstance(error, dict):
        content = error.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            return "\n".join(text for text in texts if isinstance(text, str))
        error = error.get("message")
    return error if isinstance(error, str) else "the call was not finished"
