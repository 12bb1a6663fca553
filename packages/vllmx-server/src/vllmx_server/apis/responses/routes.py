"""/v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_engine.client.request_limits import resolve_logprobs
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.apis.responses.answer import BackgroundResponses, ResponseAnswer, Running
from vllmx_server.apis.responses.answers import ErrorEvent, ItemList, ResponsesEvent
from vllmx_server.apis.responses.answers import Response as ResponseObject
from vllmx_server.apis.responses.as_chat import chat_of, items_before
from vllmx_server.apis.responses.items import shown
from vllmx_server.apis.responses.schema import RESPONSES, InputItem, ResponsesRequest
from vllmx_server.apis.responses.store import KeptResponses, StoredResponse
from vllmx_server.apis.responses.tools import requested_servers
from vllmx_server.errors import error_fields
from vllmx_server.generating.api import keyed
from vllmx_server.generating.chat_call import ChatCall, chat_call, submit_chat
from vllmx_server.generating.field_names import RESPONSES_FIELDS
from vllmx_server.generating.generate import held, started
from vllmx_server.generating.generation import Generation
from vllmx_server.generating.reading import body_bytes, checked, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.answers import Deleted
from vllmx_server.http.client import client_of, owner_of
from vllmx_server.http.deadline import deadline_of
from vllmx_server.http.event_stream import Framing, HeldResponse
from vllmx_server.http.operation import (
    AFTER,
    GENERATES,
    GENERATING,
    INCLUDE,
    LIMIT,
    ORDER,
    Events,
    Query,
)
from vllmx_server.http.pages import answer, check_query, newest_first, number, one_of, page
from vllmx_server.schema.record import encode

if TYPE_CHECKING:
    from vllmx_server.apis.responses.mcp_rounds import ToolRequest, ToolRounds

_PIECE = 64 << 10
"""Bytes of events that were kept that are sent at once."""


def _failed(error: VllmxError) -> bytes:
    """The answer to a request that failed before it had a response."""
    fields = error_fields(error)
    event = ErrorEvent(
        sequence_number=0, code=fields.code, message=fields.message, param=fields.param
    )
    return b"event: error\ndata: %b\n\n" % encode(event)


FRAMING = Framing(_failed)


Asked: TypeAlias = "ChatCall | ToolRequest | None"
"""The generation that a body asks for; None: stored items must be read before it is known."""


async def create(request: Request) -> Response | HeldResponse:
    """Answers, streamed or not, or goes on in the background."""
    served, owner, started_s = served_of(request), owner_of(request), time.monotonic()
    deadline = deadline_of(request, served.config)

    def parse(data: bytes) -> tuple[ResponsesRequest, Asked] | bytes:
        body = checked(data, served, RESPONSES)
        info = served.llm.info
        resolve_logprobs("top_logprobs", body.top_logprobs, info.max_logprobs, info.vocab_size)
        if body.background and not served.processes.leads:
            return data
        return body, asked_of(request, served, body)

    served.check_admission()
    found = await read_json(request, served, parse)
    if isinstance(found, bytes):  # the leading process runs what goes on in the background
        return await served.processes.relay(request, found)
    body, asked = found

    def generation_of(streams: list[RequestStream]) -> Generation | ToolRounds:
        if asked is None or isinstance(asked, ChatCall):
            return Generation(streams, served.metrics, started_s, deadline)
        return asked.rounds(streams, started_s, deadline)

    generation, release = await started(
        request,
        served,
        body,
        deadline,
        lambda: _submit(request, served, body, asked),
        generation_of,
    )
    made = ResponseAnswer(served, owner, body, generation)
    if not body.background:
        return held(served, bool(body.stream), made, generation, release, FRAMING)
    try:
        await made.keep()
    except BaseException:
        generation.close()
        release()
        raise
    begun = answer(made.stored.response)
    running = Running(made, generation, release)
    served.store(BackgroundResponses).begin(running)
    return _streamed(running.follow(-1)) if body.stream else begun


def asked_of(request: Request, served: Served, body: ResponsesRequest) -> Asked:
    """Prepares the call of a checked body; None: stored items are needed first. Raises
    InvalidRequestError, ForbiddenError."""
    servers = served.store(KeptResponses).tool_servers
    names = None if servers is None else servers.names
    wanted = requested_servers(body, names, served_of(request).holder(request))
    if wanted:  # imported where there are servers of tools, at the start
        from vllmx_server.apis.responses.mcp_rounds import ToolRequest

        return ToolRequest(request, served, body, wanted)
    return None if body.has_past else _call(served, body, ())


async def call_of(
    request: Request, served: Served, body: ResponsesRequest, asked: Asked
) -> ChatCall:
    """The first call of the model, after what is stored of the conversation and with the tools of
    servers."""
    if asked is None:
        return await _continued(request, served, body)
    return asked if isinstance(asked, ChatCall) else await asked.first_call()


async def _submit(
    request: Request, served: Served, body: ResponsesRequest, asked: Asked
) -> list[RequestStream]:
    call = await call_of(request, served, body, asked)
    with RESPONSES_FIELDS.told():
        return await submit_chat(request, served, call, by_events=True)


def _call(served: Served, body: ResponsesRequest, before: Sequence[InputItem]) -> ChatCall:
    chat = chat_of(body, before)
    with RESPONSES_FIELDS.told():
        return chat_call(served, chat)


async def _continued(request: Request, served: Served, body: ResponsesRequest) -> ChatCall:
    """The call after the conversation that came before it."""
    before = await items_before(request, served, body)
    size = body_bytes(request)
    return await served.llm.text.run(
        client_of(request), size, lambda _: _call(served, body, before)
    )


async def retrieve(request: Request) -> Response:
    """A response, or with `stream` the events of one in the background: those that come, and of one
    that was streamed from its beginning also later."""
    check_query(request, "stream", "starting_after", "include", "include[]", "include_obfuscation")
    after = number(request, "starting_after", 0, 1 << 29, -1)
    is_streamed = one_of(request, "stream", ("false", "true")) == "true"
    found, running = await _found(request)
    if not is_streamed:
        has_begun = running is not None and running.has_begun
        return answer(found.response | {"status": "in_progress"} if has_begun else found.response)
    if running is not None:
        return _streamed(running.follow(after))
    kept = served_of(request).store(KeptResponses)
    events = await kept.responses.events(found.id, after)
    if events is None:
        raise InvalidRequestError(
            f"response {found.id} is {found.response['status']}, and its events were not kept,"
            " as they are of one that is made with background and stream: retrieve it without"
            " stream",
            param="stream",
        )
    return _streamed(_pieces(events))


async def _found(request: Request) -> tuple[StoredResponse, Running | None]:
    """The request's response, and its work in the background. Raises ResponseNotKnownError."""
    served, name = served_of(request), request.path_params["id"]
    found = await served.store(KeptResponses).responses.get(owner_of(request), name)
    return found, served.store(BackgroundResponses).get(found.id)


async def _pieces(events: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(events), _PIECE):
        yield events[start : start + _PIECE]


def _streamed(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(
        events,
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def cancel(request: Request) -> Response:
    """Ends one in the background."""
    found, running = await _found(request)
    if not found.response["background"]:
        raise InvalidRequestError(
            f"response {found.id} was not made in the background: only those can be cancelled"
        )
    if running is not None:
        await running.cancel()
        found, _ = await _found(request)
    return answer(found.response)


async def delete(request: Request) -> Response:
    """Forgets one; one in the background ends."""
    found, running = await _found(request)
    if running is not None:
        await running.cancel()
    kept = served_of(request).store(KeptResponses)
    await kept.responses.delete(owner_of(request), found.id)
    return answer(Deleted(id=found.id, object="response"))


async def input_items(request: Request) -> Response:
    """Answers what a response was asked."""
    check_query(request, "limit", "order", "after", "include", "include[]")
    found, _ = await _found(request)
    items = found.input[::-1] if newest_first(request) else found.input
    after = request.query_params.get("after")
    if after is not None:
        ids = [item.id for item in items]
        items = items[ids.index(after) + 1 :] if after in ids else []
    limit = number(request, "limit", 1, 100, 20)
    return page(ItemList, [shown(item) for item in items[:limit]], len(items) > limit)


ITEM_PAGES = (Query("limit", "Items of a page.", {**LIMIT, "maximum": 100}), ORDER, AFTER, *INCLUDE)
_STORED = "Stored responses"
ROUTES = (
    keyed(
        "POST",
        "/v1/responses",
        create,
        GENERATING,
        ResponseObject,
        ResponsesRequest,
        events=Events(ResponsesEvent, is_named=True),
        statuses=GENERATES,
        example={"input": "Hello!", "max_output_tokens": 16},
        task="generate",
        of_model=True,
        span="chat",
    ),
    keyed(
        "GET",
        "/v1/responses/{id}",
        retrieve,
        _STORED,
        ResponseObject,
        query=(
            Query(
                "stream",
                "The events of one that runs in the background, or was made with `background`"
                " and `stream`.",
                {"enum": ["true", "false"]},
            ),
            Query(
                "starting_after",
                "The number of the last event that is known.",
                {"type": "integer", "minimum": 0, "maximum": 1 << 29},
            ),
            *INCLUDE,
            Query("include_obfuscation", "Accepted and ignored."),
        ),
        events=Events(ResponsesEvent, is_named=True),
        statuses=(404,),
        led=True,
    ),
    keyed("DELETE", "/v1/responses/{id}", delete, _STORED, Deleted, statuses=(404,), led=True),
    keyed(
        "POST",
        "/v1/responses/{id}/cancel",
        cancel,
        _STORED,
        ResponseObject,
        statuses=(404,),
        led=True,
    ),
    keyed(
        "GET",
        "/v1/responses/{id}/input_items",
        input_items,
        _STORED,
        ItemList,
        query=ITEM_PAGES,
        statuses=(404,),
    ),
)
