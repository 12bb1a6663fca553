"""What a call of a tool came to, as text for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from vllmx_core.errors import excerpt

from vllmx_server.watch.counters import Outcome

if TYPE_CHECKING:
    from mcp_types import CallToolResult


class ToolResult(msgspec.Struct, frozen=True):
    """Text for the model."""

    text: str
    is_error: bool = False
    code: int | None = None
    """The error code of the protocol, where the tool itself did not answer."""

    @property
    def outcome(self) -> Outcome:
        """The word that /metrics has for it."""
        if self.code is not None:
            return "timed_out" if self.code == TIMED_OUT else "failed"
        return "error" if self.is_error else "ok"


TIMED_OUT = -32001
NOT_THERE = -32000
REFUSED = -32602


def failure(text: str, code: int = NOT_THERE) -> ToolResult:
    """The tool did not answer."""
    return ToolResult(excerpt(text, 500), is_error=True, code=code)


def read_result(result: CallToolResult, max_bytes: int) -> ToolResult:
    """The text of a result, cut where it is too long; other content is named."""
    parts = [_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [msgspec.json.encode(result.structured_content).decode()]
    return ToolResult(_cut("\n".join(parts), max_bytes), bool(result.is_error))


def _text(block: Any) -> str:
    kind = block.type
    if kind == "text":
        return str(block.text)
    if kind in ("image", "audio"):
        return f"[{kind} {excerpt(block.mime_type, 80)}, {len(block.data)} characters: not shown]"
    if kind == "resource_link":
        return f"[resource {excerpt(str(block.uri), 500)}]"
    text = getattr(block.resource, "text", None)
    if text is not None:
        return str(text)
    return f"[resource {excerpt(str(block.resource.uri), 500)}: not shown]"


def _cut(text: str, max_bytes: int) -> str:
    if len(text) <= max_bytes // 4:
        return text
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text
    kept = data[:max_bytes].decode(errors="ignore")
    return f"{kept}\n[cut: the first {max_bytes} of {len(data)} bytes]"
