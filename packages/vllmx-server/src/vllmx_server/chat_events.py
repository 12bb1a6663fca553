"""What happens while a model answers a conversation, for routes of every shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    Event,
    ReasoningPiece,
)

from vllmx_server.chat_reading import ReadStream
from vllmx_server.content_logprobs import ContentLogprobs
from vllmx_server.errors import AbortedError
from vllmx_server.generation import Generation

__all__ = [
    "AnswerEnd",
    "ArgumentsPiece",
    "CallBegin",
    "CallEnd",
    "ChatEvent",
    "ContentPiece",
    "ReasoningPiece",
    "chat_events",
]


class AnswerEnd(msgspec.Struct, frozen=True, gc=False):
    """Nothing follows."""

    finish_reason: str
    """OpenAI's: "stop", "length" or "tool_calls"."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it."""


ChatEvent = Event | AnswerEnd


async def chat_events(
    generation: Generation, logprobs: ContentLogprobs | None = None
) -> AsyncGenerator[ChatEvent, None]:
    """The events of a generation with one choice; none before the engine's first output. Raises
    AbortedError where the engine gives the request up, and what the engine raises.

    Args:
        logprobs: is given each output before the events that it brings.
    """
    readers, usage = generation.readers, generation.usage
    reading = None if readers is None else ReadStream(readers)
    if readers is not None and readers.has_thinking:
        usage.reasoning_tokens = 0
    async with aclosing(generation.outputs()) as outputs:
        async for _, output in outputs:
            for choice in output.outputs:
                if logprobs is not None:
                    logprobs.add(choice)
                if reading is not None:
                    for event in reading.events(choice):
                        yield event
                    if usage.reasoning_tokens is not None:
                        usage.reasoning_tokens += reading.num_new_reasoning_tokens
                elif choice.text:
                    yield ContentPiece(choice.text)
                if choice.finish_reason == "abort":
                    raise AbortedError("the server is shutting down: send the request again")
                if choice.finish_reason is not None:
                    reason = choice.finish_reason
                    told = reason if reading is None else reading.finish_reason(choice)
                    yield AnswerEnd(told, choice.stop_reason)
