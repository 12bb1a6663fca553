"""The path of generating routes from the body to a response that holds the engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.generating.generation import Generation, Usage
from vllmx_server.generating.reading import (
    CheckedBody,
    body_bytes,
    checked,
    read_json,
    request_id_of,
)
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.deadline import Deadline, deadline_of
from vllmx_server.http.disconnect import unless_gone
from vllmx_server.http.event_stream import (
    OPENAI,
    EventStream,
    Framing,
    Held,
    HeldResponse,
    JSONAnswer,
)
from vllmx_server.limits.admitted import Admitted, expected_tokens
from vllmx_server.watch.tracing import Generated, trace_of


class GeneratingBody(CheckedBody, Protocol):
    """A body that asks for generated text."""

    @property
    def stream(self) -> bool | None:
        """True if the answer is streamed as events."""

    @property
    def request_id(self) -> str | None:
        """The client's own name of the request."""


Body = TypeVar("Body", bound=GeneratingBody)
Asked = TypeVar("Asked")


class Started(Held, Generated, Protocol):
    """A generation, or several in turn, with the usage of all."""

    usage: Usage


G = TypeVar("G", bound=Started)


class Answer:
    """The wire format of one request's outputs."""

    async def whole(self) -> Iterator[bytes]:
        """The body of an answer that is not streamed, in pieces."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer with their SSE framing; none before the engine's first
        output."""
        raise NotImplementedError

    @property
    def has_middle(self) -> bool:
        """True if `middle` makes the chunks of text and tokens, for one prompt with one choice."""
        return False

    def middle(self, text: str, ids: list[int]) -> bytes:
        """The part of `events` for new text and tokens between the first ones and the last; maybe
        empty."""
        raise NotImplementedError


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

    def parse(data: bytes) -> tuple[Body, Asked]:
        body = checked(data, served, decoder)
        return body, prepare(served, body)

    served.check_admission()
    body, asked = await read_json(request, served, parse)
    starting = partial(submit, request, served, body, asked)
    return await answered(request, served, body, starting, answer_of, framing, started_s)


async def answered(
    request: Request,
    served: Served,
    body: Body,
    submit: Callable[[], Coroutine[Any, Any, list[RequestStream]]],
    answer_of: Callable[[Served, Body, str, Generation], Answer],
    framing: Framing,
    started_s: float,
) -> HeldResponse:
    """The part of `generate` behind the reading of the body; `started_s`: `time.monotonic` before
    that."""
    deadline = deadline_of(request, served.config)
    generation, release = await started(
        request,
        served,
        body,
        deadline,
        submit,
        lambda streams: Generation(streams, served.metrics, started_s, deadline),
    )
    answer = answer_of(served, body, request_id_of(request, body), generation)
    return held(served, bool(body.stream), answer, generation, release, framing)


async def started(
    request: Request,
    served: Served,
    body: object,
    deadline: Deadline,
    submit: Callable[[], Coroutine[Any, Any, list[RequestStream]]],
    generation_of: Callable[[list[RequestStream]], G],
) -> tuple[G, Admitted]:
    """Admits a request and starts its streams; returns their generation, and the object that ends
    the admission. Raises what `Served.admit` and `submit` raise."""
    release = await served.admit(request, expected_tokens(body_bytes(request), body))
    try:
        generation = generation_of(await unless_gone(request.receive, submit(), deadline))
    except BaseException:
        release()
        raise
    release.usage = generation.usage
    if (trace := trace_of(request)) is not None:
        trace.generation = generation
    return generation, release


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
        ping_s = served.config.sse_ping_interval_s if framing.ping else 0.0
        make = answer.middle if answer.has_middle else None
        return EventStream(generation, release, timeout_s, answer.events(), ping_s, framing, make)
    return JSONAnswer(generation, release, timeout_s, answer.whole)
