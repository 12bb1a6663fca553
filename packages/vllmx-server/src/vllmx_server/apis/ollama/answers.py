"""Answers of Ollama's routes that generate: a line of JSON for each piece, or one object."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from vllmx_core.errors import VllmxError
from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    ReasoningPiece,
)
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.apis.ollama.schema import AnswerFields, GenerateRequest
from vllmx_server.errors import cut_message
from vllmx_server.generating.chat_events import AnswerEnd, ChatEvent, ChatEvents
from vllmx_server.generating.generate import Answer
from vllmx_server.generating.generation import Generation, phases_s
from vllmx_server.generating.logprobs import ContentLogprobs
from vllmx_server.generating.served import Served
from vllmx_server.http.event_stream import Framing
from vllmx_server.schema.record import Record, encode


def error_body(error: VllmxError) -> bytes:
    """JSON of one error as Ollama has it."""
    return encode({"error": cut_message(error)})


FRAMING = Framing(lambda error: error_body(error) + b"\n", b"", b"application/x-ndjson")
"""Clients read every line as JSON, so there are no pings."""


class Turn(Record, kw_only=True):
    """A message, or a piece of one."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


def piece(model: str, turn: Turn, *, is_chat: bool, done: bool = False) -> dict[str, Any]:
    """A piece of an answer of /api/chat or /api/generate."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    found: dict[str, Any] = {"model": model, "created_at": now, "done": done}
    if is_chat:
        found["message"] = turn
    else:
        found["response"] = turn.content
        if turn.thinking:
            found["thinking"] = turn.thinking
    return found


class Turns:
    """Makes turns of events; calls of tools are whole."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[CallBegin, list[str]]] = {}

    def of(self, events: list[ChatEvent]) -> Turn | None:
        """The turn that these add up to; None where they add nothing."""
        content = "".join(each.text for each in events if isinstance(each, ContentPiece))
        thoughts = "".join(each.text for each in events if isinstance(each, ReasoningPiece))
        calls = [call for each in events if (call := self._call(each)) is not None]
        if not (content or thoughts or calls):
            return None
        return Turn(content=content, thinking=thoughts or UNSET, tool_calls=calls or UNSET)

    def _call(self, event: ChatEvent) -> dict[str, Any] | None:
        if isinstance(event, CallBegin):
            self._calls[event.index] = (event, [])
        elif isinstance(event, ArgumentsPiece):
            self._calls[event.index][1].append(event.text)
        elif isinstance(event, CallEnd):
            call, pieces = self._calls.pop(event.index)
            try:
                found = msgspec.json.decode("".join(pieces) or "{}")
            except (msgspec.DecodeError, RecursionError):
                found = None  # cut by `length`
            arguments = found if isinstance(found, dict) else {}
            function = {"name": call.name, "index": call.index, "arguments": arguments}
            return {"id": call.id, "function": function}
        return None


class OllamaAnswer(Answer):
    """Makes the wire format of one request's outputs."""

    def __init__(
        self,
        started_s: float,
        served: Served,
        body: AnswerFields,
        request_id: str,
        generation: Generation,
    ) -> None:
        self._model = body.model
        self._is_chat = not isinstance(body, GenerateRequest)
        self._generation = generation
        self._started_s = started_s
        self._logprobs = None
        if body.logprobs:
            self._logprobs = ContentLogprobs(generation.readers, body.top_logprobs or 0)
        self._ids: list[int] = []
        self._turns = Turns()
        is_seen = self._logprobs is not None or not self._is_chat
        self._events = ChatEvents(generation, self if is_seen else None)

    def add(self, choice: CompletionOutput) -> None:
        """Takes note of an output's tokens."""
        self._ids += choice.token_ids
        if self._logprobs is not None:
            self._logprobs.add(choice)

    async def whole(self) -> Iterator[bytes]:
        events = [event async for event in self._events.all()]
        end = events.pop()
        assert isinstance(end, AnswerEnd)
        return iter((encode(self._last(self._turns.of(events) or Turn(), end)),))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events.all()) as events:
            async for event in events:
                if isinstance(event, AnswerEnd):
                    yield encode(self._last(Turn(), event)) + b"\n"
                elif line := self._line([event]):
                    yield line

    @property
    def has_middle(self) -> bool:
        return self._events.has_middle

    def middle(self, text: str, ids: list[int]) -> bytes:
        return self._line(list(self._events.more(text, ids)))

    def _line(self, events: list[ChatEvent]) -> bytes:
        turn = self._turns.of(events)
        if turn is None:
            return b""
        return encode(self._piece(turn, done=False)) + b"\n"

    def _piece(self, turn: Turn, *, done: bool) -> dict[str, Any]:
        found = piece(self._model, turn, is_chat=self._is_chat, done=done)
        if self._logprobs is not None and (entries := self._logprobs.take()):
            found["logprobs"] = entries
        return found

    def _last(self, turn: Turn, end: AnswerEnd) -> dict[str, Any]:
        usage, (first_s, rest_s) = self._generation.usage, phases_s(self._generation)
        found = self._piece(turn, done=True) | {
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": _ns(time.monotonic() - self._started_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(rest_s),
        }
        if not self._is_chat:
            found["context"] = [*self._generation.prompt_token_ids[0], *self._ids]
        return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
