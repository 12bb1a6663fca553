"""/v1/responses, with /v1/responses/input_tokens and /v1/responses/compact."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_engine.client.request_limits import resolve_logprobs
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.formats.events import ContentPiece

from vllmx_server.apis.responses.answers import (
    Compaction,
    CountedInput,
    ErrorEvent,
    ItemList,
    ResponsesEvent,
)
from vllmx_server.apis.responses.answers import Response as ResponseObject
from vllmx_server.apis.responses.as_chat import chat_of, items_before, items_of
from vllmx_server.apis.responses.items import item_of, named, shown
from vllmx_server.apis.responses.response import (
    BackgroundResponses,
    ResponseAnswer,
    Running,
    usage_of,
)
from vllmx_server.apis.responses.schema import (
    COMPACT,
    INPUT_TOKENS,
    RESPONSES,
    CompactRequest,
    InputItem,
    InputTokensRequest,
    ResponsesRequest,
)
from vllmx_server.apis.responses.store import KeptResponses, StoredResponse
from vllmx_server.apis.responses.tools import requested_servers
from vllmx_server.errors import error_fields
from vllmx_server.generating.api import keyed
from vllmx_server.generating.chat_call import ChatCall, chat_call, prompt_tokens, submit_chat
from vllmx_server.generating.chat_events import ChatEvents
from vllmx_server.generating.field_names import RESPONSES_FIELDS
from vllmx_server.generating.generate import Answer, generate, held, started
from vllmx_server.generating.generation import Generation
from vllmx_server.generating.reading import body_bytes, checked, counted, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.answers import Deleted
from vllmx_server.http.client import client_of, owner_of
from vllmx_server.http.deadline import deadline_of
from vllmx_server.http.event_stream import Framing, HeldResponse
from vllmx_server.http.operation import (
    AFTER,
    BODY,
    GENERATES,
    GENERATING,
    INCLUDE,
    LIMIT,
    ORDER,
    TEXT,
    Events,
    Query,
)
from vllmx_server.http.pages import answer, check_query, newest_first, number, one_of, page
from vllmx_server.schema.record import Items, encode, json_pieces
from vllmx_server.store.database import new_id, now

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
        return body, _asked_of(request, served, body)

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


def _asked_of(request: Request, served: Served, body: ResponsesRequest) -> Asked:
    """Prepares the call of a checked body; None: stored items are needed first. Raises
    InvalidRequestError, ForbiddenError."""
    servers = served.store(KeptResponses).tool_servers
    names = None if servers is None else servers.names
    wanted = requested_servers(body, names, served_of(request).holder(request))
    if wanted:  # imported where there are servers of tools, at the start
        from vllmx_server.apis.responses.mcp_rounds import ToolRequest

        return ToolRequest(request, served, body, wanted)
    return None if body.has_past else _call(served, body, ())


async def _call_of(
    request: Request, served: Served, body: ResponsesRequest, asked: Asked
) -> ChatCall:
    """The first call of the model, after what is stored of the conversation and with the tools of
    servers."""
    if asked is None:
        before = await items_before(request, served, body)
        return await served.llm.text.run(
            client_of(request), body_bytes(request), lambda _: _call(served, body, before)
        )
    return asked if isinstance(asked, ChatCall) else await asked.first_call()


async def _submit(
    request: Request, served: Served, body: ResponsesRequest, asked: Asked
) -> list[RequestStream]:
    call = await _call_of(request, served, body, asked)
    with RESPONSES_FIELDS.told():
        return await submit_chat(request, served, call, by_events=True)


def _call(served: Served, body: ResponsesRequest, before: Sequence[InputItem]) -> ChatCall:
    chat = chat_of(body, before)
    with RESPONSES_FIELDS.told():
        return chat_call(served, chat)


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


_KEPT = ("user", "system", "developer")
"""The roles of messages that a compacted conversation keeps as they are."""


async def input_tokens(request: Request) -> Response:
    """Counts the tokens of the prompt that a response would have."""
    served = served_of(request)

    def parse(data: bytes) -> tuple[ResponsesRequest, Asked]:
        body = checked(data, served, INPUT_TOKENS).request()
        return body, _asked_of(request, served, body)

    body, asked = await read_json(request, served, parse)
    async with counted(request) as admitted:
        call = await _call_of(request, served, body, asked)
        with RESPONSES_FIELDS.told():
            tokens = await prompt_tokens(request, served, call.conversation, call.options)
        admitted.num_tokens = len(tokens)
    return answer(CountedInput(input_tokens=len(tokens)))


async def compact(request: Request) -> HeldResponse:
    """Shortens a conversation to the user's messages and a summary that the model writes."""
    kept: list[InputItem] = []

    async def submit(
        request: Request, served: Served, body: CompactRequest, asked: ResponsesRequest
    ) -> list[RequestStream]:
        before = await items_before(request, served, asked)
        items = named([*before, *items_of(body.request())])
        kept.extend(item for item in items if item.role in _KEPT)
        with RESPONSES_FIELDS.told():
            call = await served.llm.text.run(
                client_of(request),
                body_bytes(request),
                lambda _: chat_call(served, chat_of(asked, before), fit=True),
            )
            return await submit_chat(request, served, call, by_events=True)

    return await generate(
        request,
        COMPACT,
        _asked,
        submit,
        lambda served, body, request_id, generation: _Compaction(kept, generation),
        FRAMING,
    )


def _asked(served: Served, body: CompactRequest) -> ResponsesRequest:
    """The request for the summary. Raises InvalidRequestError for items that are not served."""
    asked = body.summary_request()
    chat_of(asked, ())
    return asked


class _Compaction(Answer):
    def __init__(self, kept: list[InputItem], generation: Generation) -> None:
        self._kept = kept
        self._generation = generation

    async def whole(self) -> Iterator[bytes]:
        texts: list[str] = []
        async with aclosing(ChatEvents(self._generation).all()) as events:
            async for event in events:
                if isinstance(event, ContentPiece):
                    texts.append(event.text)
        found = {
            "id": new_id("resp_"),
            "object": "response.compaction",
            "created_at": now(),
            "output": Items(chain(map(shown, self._kept), (item_of("".join(texts)),))),
            "usage": usage_of(self._generation.usage),
        }
        return json_pieces(found)


ITEM_PAGES = (Query("limit", "Items of a page.", {**LIMIT, "maximum": 100}), ORDER, AFTER, *INCLUDE)
_STORED = "Stored responses"
ROUTES = (
    keyed(
        "POST",
        "/v1/responses/input_tokens",
        input_tokens,
        TEXT,
        CountedInput,
        InputTokensRequest,
        statuses=(*BODY, 404),
        example={"input": "Hello!"},
        task="generate",
        of_model=True,
    ),
    keyed(
        "POST",
        "/v1/responses/compact",
        compact,
        GENERATING,
        Compaction,
        CompactRequest,
        statuses=GENERATES,
        example={"input": "Hello!"},
        task="generate",
        of_model=True,
    ),
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
