"""What the generating routes have in common: from the body to a response that holds the engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.generating.generation import Generation
from vllmx_server.generating.reading import (
    CheckedBody,
    body_bytes,
    checked,
    read_json,
    request_id_of,
)
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.deadline import deadline_of
from vllmx_server.http.disconnect import unless_gone
from vllmx_server.http.event_stream import (
    OPENAI,
    EventStream,
    Framing,
    Held,
    HeldResponse,
    JSONAnswer,
)
from vllmx_server.limits.admitted import expected_tokens
from vllmx_server.watch.tracing import trace_of


class GeneratingBody(CheckedBody, Protocol):
    """A body that asks for generated text."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer comes in events."""
        ...

    @property
    def request_id(self) -> str | None:
        """The client's own name of the request."""
        ...


Body = TypeVar("Body", bound=GeneratingBody)
Asked = TypeVar("Asked")


class Answer(Protocol):
    """The wire format of one request's outputs."""

    async def whole(self) -> Iterator[bytes]:
        """The body of an answer that is not streamed, in pieces."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer with their SSE framing; none before the engine's first
        output."""
        ...

    @property
    def has_middle(self) -> bool:
        """Whether `middle` makes the chunks of text and tokens, where one prompt has one choice."""
        ...

    def middle(self, text: str, ids: list[int]) -> bytes:
        """What `events` says of new text and tokens between the first ones and the last; maybe
        nothing."""
        ...


async def generate(
    request: Request,
    decoder: msgspec.json.Decoder[Body],
    prepare: Callable[[Served, Body], Asked],
    submit: Callable[[Request, Served, Body, Asked], Coroutine[Any, Any, list[RequestStream]]],
    answer_of: Callable[[Served, Body, str, Generation], Answer],
    framing: Framing = OPENAI,
) -> HeldResponse:
    """Reads and checks the body, unless it could not be admitted, starts an engine request for each
    prompt (`submit`: all or none), and answers with what `answer_of` (served, body, request id,
    generation) makes of them, in a stream with the pings and the error event of `framing`.
    `prepare` makes of a body what is submitted, on a thread where the body is large."""
    served, started_s = served_of(request), time.monotonic()
    deadline = deadline_of(request, served.config)

    def parse(data: bytes) -> tuple[Body, Asked]:
        body = checked(data, served, decoder)
        return body, prepare(served, body)

    served.check_admission()
    body, asked = await read_json(request, served, parse)
    release = await served.admit(request, expected_tokens(body_bytes(request), body))
    try:
        streams = await unless_gone(request.receive, submit(request, served, body, asked), deadline)
    except BaseException:
        release()
        raise
    generation = Generation(streams, served.metrics, started_s, deadline)
    release.usage = generation.usage
    if (trace := trace_of(request)) is not None:
        trace.generation = generation
    answer = answer_of(served, body, request_id_of(request, body), generation)
    return held(served, bool(body.stream), answer, generation, release, framing)


def held(
    served: Served,
    is_streamed: bool,
    answer: Answer,
    generation: Held,
    release: Callable[[], None],
    framing: Framing,
) -> HeldResponse:
    """The response that sends an answer."""
    timeout_s = served.config.send_timeout_s
    if is_streamed:
        ping_s = served.config.sse_ping_interval_s
        make = answer.middle if answer.has_middle else None
        return EventStream(generation, release, timeout_s, answer.events(), ping_s, framing, make)
    return JSONAnswer(generation, release, timeout_s, answer.whole)
