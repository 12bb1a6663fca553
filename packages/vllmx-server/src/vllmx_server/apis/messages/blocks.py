"""Content blocks of Anthropic's Messages, out of what happens while a model answers."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    ReasoningPiece,
)

from vllmx_server.apis.messages.answers import (
    BlockStart,
    ContentBlock,
    Stop,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from vllmx_server.generating.chat_events import AnswerEnd, ChatEvent
from vllmx_server.schema.record import encode

Block = TypeVar("Block", TextBlock, ThinkingBlock)
_TEXT, _THINKING = TextBlock(), ThinkingBlock()


def stop_fields(end: AnswerEnd | None, cut_by_context: bool) -> Stop:
    """Why an answer ended."""
    reason = "end_turn" if end is None else end.finish_reason
    if reason == "tool_calls":
        return Stop(stop_reason="tool_use", stop_sequence=None)
    if reason == "length":
        found: StopReason = "model_context_window_exceeded" if cut_by_context else "max_tokens"
        return Stop(stop_reason=found, stop_sequence=None)
    if end is not None and isinstance(end.stop_reason, str):
        return Stop(stop_reason="stop_sequence", stop_sequence=end.stop_reason)
    return Stop(stop_reason="end_turn", stop_sequence=None)


class Blocks:
    """All blocks of an answer that is not streamed."""

    def __init__(self) -> None:
        self.content: list[ContentBlock] = []
        self._arguments: dict[int, list[str]] = {}
        self._calls: dict[int, ToolUseBlock] = {}
        self._end: AnswerEnd | None = None

    def add(self, event: ChatEvent) -> None:
        """Takes what happened next."""
        if isinstance(event, ContentPiece):
            self._open(TextBlock).text += event.text
        elif isinstance(event, ReasoningPiece):
            self._open(ThinkingBlock).thinking += event.text
        elif isinstance(event, CallBegin):
            block = ToolUseBlock(id=event.id, name=event.name, input={})
            self._calls[event.index] = block
            self.content.append(block)
        elif isinstance(event, ArgumentsPiece):
            self._arguments.setdefault(event.index, []).append(event.text)
        elif isinstance(event, AnswerEnd):
            self._end = event
            self._fill_inputs()

    def stop(self, cut_by_context: bool) -> Stop:
        """The reason why the answer ended."""
        return stop_fields(self._end, cut_by_context)

    def _open(self, kind: type[Block]) -> Block:
        last = self.content[-1] if self.content else None
        if isinstance(last, kind):
            return last
        new = kind()
        self.content.append(new)
        return new

    def _fill_inputs(self) -> None:
        """An input that was cut by `length` cannot be read and stays an empty object."""
        for index, block in self._calls.items():
            try:
                found = msgspec.json.decode("".join(self._arguments.get(index, ())) or "{}")
            except (msgspec.DecodeError, RecursionError):
                continue
            if isinstance(found, dict):
                block.input = found


class BlockEvents:
    """The events of a streamed answer's blocks, one block open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None
        self._end: AnswerEnd | None = None

    def of(self, event: ChatEvent) -> bytes:
        """The bytes to send for an event; maybe none."""
        if isinstance(event, ContentPiece):
            return self._open("text", _TEXT) + self._delta(b'"text_delta","text":', event.text)
        if isinstance(event, ReasoningPiece):
            return self._open("thinking", _THINKING) + self._delta(
                b'"thinking_delta","thinking":', event.text
            )
        if isinstance(event, CallBegin):
            block = ToolUseBlock(id=event.id, name=event.name, input={})
            return self._close() + self._open("tool_use", block)
        if isinstance(event, ArgumentsPiece):
            return self._delta(b'"input_json_delta","partial_json":', event.text)
        if isinstance(event, CallEnd):
            return self._close()
        self._end = event
        return self._close()

    def stop(self, cut_by_context: bool) -> Stop:
        """The reason why the answer ended."""
        return stop_fields(self._end, cut_by_context)

    def _open(self, kind: str, block: ContentBlock) -> bytes:
        if self._kind == kind:
            return b""
        before = self._close()
        self._index += 1
        self._kind = kind
        return b"%bevent: content_block_start\ndata: %b\n\n" % (
            before,
            encode(BlockStart(index=self._index, content_block=block)),
        )

    def _delta(self, fields: bytes, text: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":%b%b}}\n\n'
        ) % (self._index, fields, encode(text))

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return (
            b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
        ) % self._index
