"""Answers of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, Literal

from vllmx_server.errors import MessagesErrorFields
from vllmx_server.schema.record import Record

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(Record, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(Record, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: Literal[""] = ""


class ToolUseBlock(Record, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    """Empty in a stream, where it comes in pieces."""


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Record, kw_only=True):
    input_tokens: int
    """The tokens of the prompt without those from the prefix cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(Record, kw_only=True):
    """A whole answer, or how it begins in a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountedTokens(Record, kw_only=True):
    input_tokens: int


# --- events ---------------------------------------------------------------------------------------
class MessageStart(Record, kw_only=True, tag_field="type", tag="message_start"):
    message: Message


class Ping(Record, tag_field="type", tag="ping"):
    """Something else comes later."""


class BlockStart(Record, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Record, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Record, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJSONDelta(Record, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Record, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJSONDelta


class BlockStop(Record, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(Record, kw_only=True):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Record, kw_only=True, tag_field="type", tag="message_delta"):
    delta: Stop
    usage: MessagesUsage


class MessageStop(Record, tag_field="type", tag="message_stop"):
    """The last event."""


class MessagesErrorEvent(Record, kw_only=True, tag_field="type", tag="error"):
    """The last event of an answer that failed."""

    error: MessagesErrorFields


MessagesEvent = (
    MessageStart
    | Ping
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | MessagesErrorEvent
)
