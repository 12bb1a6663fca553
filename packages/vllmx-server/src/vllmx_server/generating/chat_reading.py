"""Thoughts and calls of tools in chat answers, as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
from typing import Any

from vllmx_engine.client.answers import AnswerReaders, is_cut
from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    Event,
    ReadAnswer,
    ReasoningPiece,
)
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.generating.answers import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    FinishReason,
)
from vllmx_server.generating.chunks import Chunks, encode

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
        """How many tokens of the output that was read last are thoughts."""

    def events(self, choice: CompletionOutput) -> list[Event]:
        """What an output adds."""
        events = self.more(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            events = events + self._shown(self._reader.finish(is_cut=is_cut(choice)))
        return events

    def more(self, text: str, ids: list[int]) -> list[Event]:
        """What text and tokens add after which more follows."""
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


class PlainChunks:
    """Chunks of one choice of a stream without log-probabilities and the like, of ready bytes: one
    is made for almost every token."""

    def __init__(self, chunks: Chunks, index: int) -> None:
        self._begin = b'%b{"index":%d,"delta":' % (chunks.head, index)
        self._end = b',"logprobs":null,"finish_reason":null}' + chunks.tail
        self._begin_content = self._begin + b'{"content":'
        self._begin_reasoning = self._begin + b'{"reasoning_content":'
        self._end_text = b"}" + self._end

    def content(self, text: str) -> bytes:
        """A piece of the answer."""
        return b"%b%b%b" % (self._begin_content, encode(text), self._end_text)

    def of(self, event: Event) -> bytes:
        """What an event adds."""
        if isinstance(event, ContentPiece):
            return self.content(event.text)
        if isinstance(event, ReasoningPiece):
            text = encode(event.text)
            found = (self._begin_reasoning, text, b',"reasoning":', text, self._end_text)
            return b"".join(found)
        if isinstance(event, ArgumentsPiece):
            delta = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
                event.index,
                encode(event.text),
            )
        else:
            delta = encode(delta_of(event))
        return b"%b%b%b" % (self._begin, delta, self._end)


def delta_of(event: Event) -> dict[str, Any]:
    """What an event adds to the message."""
    match event:
        case ContentPiece(text):
            return {"content": text}
        case ReasoningPiece(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ArgumentsPiece(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return {}


def deltas(events: list[Event]) -> list[dict[str, Any]]:
    """One for each event that adds something, or an empty one."""
    return [delta_of(event) for event in events if not isinstance(event, CallEnd)] or [{}]


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
                    id=call.id,
                    function=CalledFunction(name=call.name, arguments=call.arguments),
                )
                for call in calls
            ]
        return message
