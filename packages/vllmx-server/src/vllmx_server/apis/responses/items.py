"""Items of responses and conversations: their ids and their form in the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vllmx_server.apis.responses.schema import InputItem, InputPart
from vllmx_server.store.ids import new_id

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
