"""What the generating routes have in common: from the body to a response that holds the engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.body import read_json
from vllmx_server.disconnect import unless_gone
from vllmx_server.event_stream import EventStream, HeldResponse, JSONAnswer
from vllmx_server.generation import Generation
from vllmx_server.schema.sampling import SamplingFields
from vllmx_server.state import ServerState, request_id_of, state_of

Body = TypeVar("Body", bound=SamplingFields)


class Answer(Protocol):
    """The wire format of one request's outputs."""

    async def whole(self) -> Iterator[bytes]:
        """The body of an answer that is not streamed, in pieces."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer with their SSE framing; none before the engine's first
        output."""
        ...


async def generate(
    request: Request,
    decoder: msgspec.json.Decoder[Body],
    submit: Callable[[Request, ServerState, Body], Coroutine[Any, Any, list[RequestStream]]],
    answer_of: Callable[[ServerState, Body, str, Generation], Answer],
) -> HeldResponse:
    """Reads and checks the body, unless it could not be admitted, starts an engine request for each
    prompt (`submit`: all or none), and answers with what `answer_of` (state, body, request id,
    generation) makes of them."""
    state, started_s = state_of(request), time.monotonic()
    state.check_admission()
    body = await read_json(request, state, decoder)
    release = state.admit()
    try:
        streams = await unless_gone(request.receive, submit(request, state, body))
    except BaseException:
        release()
        raise
    generation = Generation(streams, state.metrics, started_s)
    answer = answer_of(state, body, request_id_of(request, body), generation)
    timeout_s = state.config.send_timeout_s
    if body.stream:
        ping_s = state.config.sse_ping_interval_s
        return EventStream(generation, release, timeout_s, answer.events(), ping_s)
    return JSONAnswer(generation, release, timeout_s, answer.whole)
