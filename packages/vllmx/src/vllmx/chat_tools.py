"""Tools of MCP servers in `vllmx chat`: rounds of calls, until the model answers without any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import ConfigError, excerpt
from vllmx_core.sampling import SamplingParams

if TYPE_CHECKING:
    from vllmx_engine.client.answers import AnswerReaders
    from vllmx_engine.engine import Engine, TextStream
    from vllmx_engine.formats.events import ReadAnswer
    from vllmx_engine.wire.outputs import ToolCall
    from vllmx_server.mcp.offered import OfferedTool, ToolResult
    from vllmx_server.mcp.servers import ToolServers

MAX_ROUNDS = 16
MAX_TOOLS = 256
_SHOWN = 300


class Aside(str):
    """A piece that is not part of the answer: a thought, or a call and its result."""

    __slots__ = ()


class ChatTools:
    """The tools that the model may call.

    Args:
        servers: already started.
        template_arguments: variables of the chat template.
    """

    def __init__(self, servers: ToolServers, template_arguments: dict[str, Any]) -> None:
        self._servers = servers
        self._template_arguments = template_arguments

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

    def _tools(self) -> list[OfferedTool]:
        """The tools of all servers that can be called now."""
        return [tool for name in self._servers.names for tool in self._servers.tools(name)]

    def round(
        self, engine: Engine, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> Round:
        """Begins one answer of the model. Raises the engine's refusal."""
        from vllmx_engine.client.chat import ChatOptions

        functions = [tool.function for tool in self._tools()]
        prompt = engine.apply_chat_template(messages, tools=functions, **self._template_arguments)
        params = engine.sampling_params(**sampling)
        options = ChatOptions(tools=functions, template_kwargs=self._template_arguments)
        seq_id, _, stream = engine.generate_stream(params, prompt, chat=options)
        return Round(seq_id, stream, params)

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


class Round:
    """One answer of the model: text, perhaps with thoughts before it and calls after it.

    Attributes:
        found: the parts of the answer so far.
    """

    def __init__(self, seq_id: int, stream: TextStream, params: SamplingParams) -> None:
        from vllmx_engine.formats.events import ReadAnswer

        self.seq_id = seq_id
        self.stream = stream
        self.params = params
        self.found: ReadAnswer = ReadAnswer()

    def pieces(self) -> Iterator[str]:
        """Yields text as it arrives; thoughts are asides."""
        from vllmx_engine.formats.events import ContentPiece, Event, ReasoningPiece

        readers: AnswerReaders | None = self.stream.readers
        if readers is None:
            for piece in self.stream:
                self.found.add([ContentPiece(piece)])
                yield piece
            return
        reader, is_thinking = readers.reader(), False

        def shown(events: list[Event]) -> Iterator[str]:
            nonlocal is_thinking
            self.found.add(events)
            for event in events:
                if isinstance(event, ContentPiece):
                    yield "\n" * is_thinking + event.text
                    is_thinking = False
                elif isinstance(event, ReasoningPiece):
                    yield Aside(event.text)
                    is_thinking = True

        for piece in self.stream:
            yield from shown(reader.push(piece))
        yield from shown(reader.finish(is_cut=self.stream.finish_reason != "stop"))

    def calls(self) -> list[ToolCall]:
        """Calls that are complete."""
        return self.found.tool_calls if self.stream.finish_reason == "stop" else []


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
