"""Tools of MCP servers as models are offered them, and the results of calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllmx_core.errors import InvalidRequestError, excerpt, listing

from vllmx_server.generating.tools import check_tools
from vllmx_server.mcp.settings import ServerSettings
from vllmx_server.watch.counters import Outcome

if TYPE_CHECKING:
    from mcp_types import CallToolResult, Tool


MAX_TOOLS = 128
"""The most tools of one server."""
MAX_TOOL_BYTES = 16 << 10
"""The most bytes of one tool's definition, which is part of every prompt."""
_MAX_NAME = 128
_STRANGE = re.compile(r"[^A-Za-z0-9_-]")


class OfferedTool(msgspec.Struct, frozen=True):
    """One tool."""

    name: str
    """The models' name for it: the server's name, two underscores, and the tool's name without
    characters that models cannot write."""
    server: str
    tool: str
    """The server's own name of it."""
    description: str
    schema: dict[str, Any]
    annotations: dict[str, Any] | None = None

    @property
    def function(self) -> dict[str, Any]:
        """The tool in the form of chats."""
        spec = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": spec}


def offered(
    settings: ServerSettings, tools: Iterable[Tool]
) -> tuple[tuple[OfferedTool, ...], list[str]]:
    """Tools of a server that models can be offered, and for each of the others why not, for the
    log."""
    found: dict[str, OfferedTool] = {}
    left_out: list[str] = []
    allowed = settings.allowed_tools
    for tool in tools:
        if allowed is not None and tool.name not in allowed:
            continue
        made = _offered(settings.name, tool)
        if isinstance(made, str):
            left_out.append(made)
        elif made.name in found:
            left_out.append(f"{made.name} is there twice")
        elif len(found) == MAX_TOOLS:
            left_out.append(f"{made.name} is one too many")
        else:
            found[made.name] = made
    for name in allowed or ():
        if all(tool.tool != name for tool in found.values()):
            left_out.append(f"{name[:_MAX_NAME]!r} is allowed and not there")
    return tuple(found.values()), left_out


def _offered(server: str, tool: Tool) -> OfferedTool | str:
    name = f"{server}__{_STRANGE.sub('_', tool.name)}"[:_MAX_NAME]
    hints = tool.annotations
    made = OfferedTool(
        name,
        server,
        tool.name,
        tool.description or tool.title or "",
        {"type": "object", **tool.input_schema},
        None if hints is None else hints.model_dump(mode="json", by_alias=True, exclude_none=True),
    )
    if not tool.name or len(tool.name) > _MAX_NAME:
        return f"{name} has a name of {len(tool.name)} characters"
    if len(msgspec.json.encode(made)) > MAX_TOOL_BYTES:
        return f"{name} is defined by more than {MAX_TOOL_BYTES} bytes"
    if not isinstance(made.schema.get("properties", {}), dict):
        return f"{name} has a schema whose properties are no object"
    try:
        check_tools([made.function])
    except InvalidRequestError:
        return f"{name} has a schema that is none of an object, or too deep"
    return made


def called(tools: Iterable[OfferedTool], name: str) -> OfferedTool | None:
    """The tool that a model means: models leave out the server's name where that is plain."""
    own = []
    for tool in tools:
        if tool.name == name:
            return tool
        if tool.tool == name:
            own.append(tool)
    return own[0] if len(own) == 1 else None


def chosen(
    tools: Sequence[OfferedTool], names: Sequence[str] | None, param: str
) -> list[OfferedTool]:
    """Tools that a request allows, by the server's names of them or ours; None: all. Raises
    InvalidRequestError."""
    if names is None:
        return list(tools)
    known = {tool.tool for tool in tools} | {tool.name for tool in tools}
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        have = listing([tool.tool for tool in tools])
        raise InvalidRequestError(
            f"{param} names {wrong[:_MAX_NAME]!r}, which is none of the server's tools: {have}",
            param=param,
        )
    return [tool for tool in tools if tool.tool in names or tool.name in names]


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
