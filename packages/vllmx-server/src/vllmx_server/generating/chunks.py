"""Streamed chunks, whose constant parts are encoded once."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    Event,
    ReasoningPiece,
)

from vllmx_server.generating.generation import Generation, Usage, request_timings
from vllmx_server.generating.sampling import StreamOptions, stream_options
from vllmx_server.generating.served import Served
from vllmx_server.http.event_stream import DONE
from vllmx_server.schema.record import encode, json_pieces


class Chunks:
    """Frames choices as the server-sent events of one answer.

    With `include_usage` a last chunk has the usage and no choices, and the others say
    `"usage": null`, as OpenAI's do; with `continuous_usage_stats` each has the usage so far.

    Args:
        options: of the request.
        model: as the request names it.
    """

    def __init__(
        self,
        kind: str,
        answer_id: str,
        created: int,
        served: Served,
        options: StreamOptions | None,
        model: str | None,
    ) -> None:
        self._config = served.config
        options = stream_options(options, served.config.enable_force_include_usage)
        fixed = {
            "id": answer_id,
            "object": kind,
            "created": created,
            "model": served.called(model),
            "system_fingerprint": served.fingerprint,
        }
        self.head = b"data: " + encode(fixed)[:-1] + b',"choices":['
        self._has_last_usage = options is not None and options.has_usage
        self.has_usage = self._has_last_usage and bool(options and options.continuous_usage_stats)
        self.tail = b'],"usage":null}\n\n' if self._has_last_usage else b"]}\n\n"

    def chunk(
        self, choice: dict[str, Any], usage: Usage, num_unsent: int = 0, **extra: Any
    ) -> bytes:
        """One choice, and fields next to it. `num_unsent`: tokens in `usage` that the client gets
        with later chunks."""
        more = b"".join(b",%b:%b" % (encode(name), encode(extra[name])) for name in extra)
        encoded = b"".join(json_pieces(choice))
        return self.head + encoded + self._end(usage, num_unsent, more)

    def end(self, generation: Generation) -> bytes:
        """The end of a stream, after a chunk with usage and times if they are wanted."""
        if not self._has_last_usage:
            return DONE
        timings = request_timings(self._config, generation)
        more = b"" if timings is UNSET else b',"metrics":' + encode(timings)
        usage = encode(generation.usage.shown())
        return self.head + b'],"usage":%b%b}\n\n' % (usage, more) + DONE

    def _end(self, usage: Usage, num_unsent: int, more: bytes) -> bytes:
        if self.has_usage:
            return b'],"usage":%b%b}\n\n' % (encode(usage.shown(num_unsent)), more)
        return b"]" + more + self.tail[1:]


class PlainChunks:
    """Chunks of one choice of a stream without log-probabilities and the like, of ready bytes: one
    is made for almost every token."""

    def __init__(self, chunks: Chunks, index: int) -> None:
        self._begin = b'%b{"index":%d,"delta":' % (chunks.head, index)
        self._end = b',"logprobs":null,"finish_reason":null}' + chunks.tail
        self._begin_content = self._begin + b'{"content":'
        self._end_text = b"}" + self._end

    def content(self, text: str) -> bytes:
        """A piece of the answer."""
        return b"%b%b%b" % (self._begin_content, encode(text), self._end_text)

    def of(self, event: Event) -> bytes:
        """The chunk of an event."""
        if isinstance(event, ContentPiece):
            return self.content(event.text)
        return b"%b%b%b" % (self._begin, encode(delta_of(event)), self._end)


def delta_of(event: Event) -> dict[str, Any]:
    """The part of the message that an event adds."""
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
