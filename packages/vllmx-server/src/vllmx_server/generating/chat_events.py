"""The events of a model's answer to a conversation: thoughts, text, calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from vllmx_engine.client.answers import AnswerReaders, is_cut
from vllmx_engine.formats.events import ContentPiece, Event, ReadAnswer, ReasoningPiece
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.errors import AbortedError
from vllmx_server.generating.answers import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    FinishReason,
)
from vllmx_server.generating.generation import Generation


class AnswerEnd(msgspec.Struct, frozen=True, gc=False):
    """Nothing follows."""

    finish_reason: str
    """OpenAI's: "stop", "length" or "tool_calls"."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it."""


ChatEvent = Event | AnswerEnd


class Outputs(Protocol):
    """Sees each output of a choice."""

    def add(self, choice: CompletionOutput) -> None: ...


class ChatEvents:
    """The events of a generation with one choice.

    Args:
        outputs: is given each output before the events that it brings.
    """

    def __init__(self, generation: Generation, outputs: Outputs | None = None) -> None:
        self._generation = generation
        self._outputs = outputs
        readers = generation.readers
        self._reading = None if readers is None else ReadStream(readers)
        usage = generation.usage
        if readers is not None and readers.has_thinking and usage.reasoning_tokens is None:
            usage.reasoning_tokens = 0

    @property
    def has_middle(self) -> bool:
        """`more` may take what comes."""
        return self._outputs is None

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
        if self._outputs is not None:
            self._outputs.add(choice)
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


_SLICE_CHARS = 4096
"""The characters of a whole answer that are read between two turns of the event loop."""


class ReadStream:
    """One choice of a streamed answer.

    Args:
        hides_reasoning: thoughts are separated from content and left out.
    """

    def __init__(self, readers: AnswerReaders, *, hides_reasoning: bool = False) -> None:
        self._reader = readers.reader()
        self._counter = readers.reasoning_counter()
        self._hides_reasoning = hides_reasoning
        self.num_new_reasoning_tokens = 0
        """The number of tokens of thoughts in the output that was read last."""

    def events(self, choice: CompletionOutput) -> list[Event]:
        events = self.more(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            events = events + self._shown(self._reader.finish(is_cut=is_cut(choice)))
        return events

    def more(self, text: str, ids: list[int]) -> list[Event]:
        """The events of text and tokens after which more follows."""
        events = self._reader.push(text)
        self.num_new_reasoning_tokens = self._counter.add(ids, self._reader)
        return self._shown(events)

    def _shown(self, events: list[Event]) -> list[Event]:
        if not self._hides_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningPiece)]

    def finish_reason(self, choice: CompletionOutput) -> FinishReason:
        """The reason of the last output; "tool_calls" where the model called some."""
        return finish_reason(choice, self._reader.calls_tools)


def finish_reason(choice: CompletionOutput, calls_tools: bool) -> FinishReason:
    """OpenAI's reason why an answer ended."""
    assert choice.finish_reason is not None
    return "tool_calls" if calls_tools and choice.finish_reason == "stop" else choice.finish_reason


class WholeAnswer:
    """A choice of an answer that is not streamed."""

    def __init__(self, found: ReadAnswer, calls_tools: bool, num_reasoning_tokens: int) -> None:
        self._found = found
        self._calls_tools = calls_tools
        self.num_reasoning_tokens = num_reasoning_tokens

    @classmethod
    async def read(cls, readers: AnswerReaders, choice: CompletionOutput) -> WholeAnswer:
        """Reads it, a slice between two turns of the event loop."""
        reader, found = readers.reader(), ReadAnswer()
        for start in range(0, len(choice.text), _SLICE_CHARS):
            if start:
                await asyncio.sleep(0)
            found.add(reader.push(choice.text[start : start + _SLICE_CHARS]))
        found.add(reader.finish(is_cut=is_cut(choice)))
        tokens = readers.reasoning_counter().add(choice.token_ids, reader)
        return cls(found, reader.calls_tools, tokens)

    def finish_reason(self, choice: CompletionOutput) -> FinishReason:
        """ "tool_calls" where the model called some."""
        return finish_reason(choice, self._calls_tools)

    def message(self, echoed: str, *, has_reasoning: bool) -> AssistantMessage:
        """The message, with its calls if there are some."""
        calls = self._found.tool_calls
        content = echoed + self._found.content
        message = AssistantMessage(content=None if calls and not content else content)
        if has_reasoning:
            message.reasoning = message.reasoning_content = self._found.reasoning or None
        if calls:
            message.tool_calls = [
                CalledTool(
                    id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments)
                )
                for call in calls
            ]
        return message
