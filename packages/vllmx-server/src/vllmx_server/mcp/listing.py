"""Lists of tools on their way to the package `mcp`, which refuses all tools of a list for one that
is wrong: such a tool is taken out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams


class ToolLists:
    """The lists of one connection.

    Attributes:
        num_wrong: tools that were taken out.
        heard_s: when the last message came, in seconds of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.num_wrong = 0
        self.heard_s = time.monotonic()

    @asynccontextmanager
    async def checked(
        self, transport: AbstractAsyncContextManager[TransportStreams]
    ) -> AsyncIterator[TransportStreams]:
        """A transport of which only such lists come as are right."""
        async with transport as (messages, requests):
            yield _Checked(messages, self), requests

    def clean(self, result: Any) -> None:
        """Takes wrong tools out of an answer, if it is a list of tools."""
        tools = result.get("tools") if isinstance(result, dict) else None
        if isinstance(tools, list):
            right = [tool for tool in tools if _is_right(tool)]
            self.num_wrong += len(tools) - len(right)
            result["tools"] = right


def _is_right(tool: Any) -> bool:
    """True if a tool can be read; what is not used here, the schema of results, is taken away."""
    from mcp_types import Tool

    schema = tool.get("inputSchema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict) or schema.setdefault("type", "object") != "object":
        return False
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return False
    if not all(isinstance(each, dict | bool) for each in properties.values()):
        return False
    tool.pop("outputSchema", None)
    try:
        Tool.model_validate(tool, by_name=False)
    except ValueError:
        return False
    return True


class _Checked:
    """A stream of messages, as `mcp` reads it."""

    def __init__(self, stream: Any, lists: ToolLists) -> None:
        self._stream = stream
        self._lists = lists

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _Checked:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)

    def __aiter__(self) -> _Checked:
        return self

    async def __anext__(self) -> Any:
        return self._seen(await self._stream.__anext__())

    async def receive(self) -> Any:
        """The next message."""
        return self._seen(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _seen(self, item: Any) -> Any:
        self._lists.heard_s = time.monotonic()
        self._lists.clean(getattr(getattr(item, "message", None), "result", None))
        return item
