"""What happens while a model answers a conversation, for routes of every shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
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
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.errors import AbortedError
from vllmx_server.generating.chat_reading import ReadStream
from vllmx_server.generating.content_logprobs import ContentLogprobs
from vllmx_server.generating.generation import Generation

__all__ = [
    "AnswerEnd",
    "ArgumentsPiece",
    "CallBegin",
    "CallEnd",
    "ChatEvent",
    "ChatEvents",
    "ContentPiece",
    "ReasoningPiece",
]


class AnswerEnd(msgspec.Struct, frozen=True, gc=False):
    """Nothing follows."""

    finish_reason: str
    """OpenAI's: "stop", "length" or "tool_calls"."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it."""


ChatEvent = Event | AnswerEnd


class ChatEvents:
    """The events of a generation with one choice.

    Args:
        logprobs: is given each output before the events that it brings.
    """

    def __init__(self, generation: Generation, logprobs: ContentLogprobs | None = None) -> None:
        self._generation = generation
        self._logprobs = logprobs
        readers = generation.readers
        self._reading = None if readers is None else ReadStream(readers)
        usage = generation.usage
        if readers is not None and readers.has_thinking and usage.reasoning_tokens is None:
            usage.reasoning_tokens = 0

    @property
    def has_middle(self) -> bool:
        """`more` may take what comes."""
        return self._logprobs is None

    def more(self, text: str, ids: list[int]) -> Sequence[ChatEvent]:
        """Events of text and tokens that came past `all`, and after which more follows."""
        if self._reading is None:
            return [ContentPiece(text)] if text else []
        return self._noted(self._reading.more(text, ids))

    async def all(self) -> AsyncGenerator[ChatEvent, None]:
        """All events as they come; none before the engine's first output. Raises AbortedError where
        the engine gives the request up, and what the engine raises."""
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                for choice in output.outputs:
                    for event in self._of(choice):
                        yield event
                    if choice.finish_reason == "abort":
                        raise AbortedError("the server is shutting down: send the request again")
                    if choice.finish_reason is not None:
                        yield AnswerEnd(self._finish_reason(choice), choice.stop_reason)

    def _of(self, choice: CompletionOutput) -> Sequence[ChatEvent]:
        if self._logprobs is not None:
            self._logprobs.add(choice)
        if self._reading is None:
            return [ContentPiece(choice.text)] if choice.text else []
        return self._noted(self._reading.events(choice))

    def _noted(self, events: list[Event]) -> list[Event]:
        usage, reading = self._generation.usage, self._reading
        if usage.reasoning_tokens is not None and reading is not None:
            usage.reasoning_tokens += reading.num_new_reasoning_tokens
        return events

    def _finish_reason(self, choice: CompletionOutput) -> str:
        assert choice.finish_reason is not None
        return (
            choice.finish_reason if self._reading is None else self._reading.finish_reason(choice)
        )
