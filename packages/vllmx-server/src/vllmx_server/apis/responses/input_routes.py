"""/v1/responses/input_tokens and /v1/responses/compact: count or shorten a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from itertools import chain

from starlette.requests import Request
from starlette.responses import Response
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.formats.events import ContentPiece

from vllmx_server.apis.responses.answer import usage_of
from vllmx_server.apis.responses.answers import Compaction, CountedInput
from vllmx_server.apis.responses.as_chat import chat_of, items_before, items_of
from vllmx_server.apis.responses.items import item_of, named, shown
from vllmx_server.apis.responses.routes import FRAMING, Asked, asked_of, call_of
from vllmx_server.apis.responses.schema import (
    COMPACT,
    INPUT_TOKENS,
    CompactRequest,
    InputItem,
    InputTokensRequest,
    ResponsesRequest,
)
from vllmx_server.generating.api import keyed
from vllmx_server.generating.chat_call import chat_call, prompt_tokens, submit_chat
from vllmx_server.generating.chat_events import ChatEvents
from vllmx_server.generating.field_names import RESPONSES_FIELDS
from vllmx_server.generating.generate import Answer, generate
from vllmx_server.generating.generation import Generation
from vllmx_server.generating.reading import body_bytes, checked, counted, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.event_stream import HeldResponse
from vllmx_server.http.operation import BODY, GENERATES, GENERATING, TEXT
from vllmx_server.http.pages import answer
from vllmx_server.schema.record import Items, json_pieces
from vllmx_server.store.database import new_id, now

_KEPT = ("user", "system", "developer")
"""The roles of messages that a compacted conversation keeps as they are."""


async def input_tokens(request: Request) -> Response:
    """Counts the tokens of the prompt that a response would have."""
    served = served_of(request)

    def parse(data: bytes) -> tuple[ResponsesRequest, Asked]:
        body = checked(data, served, INPUT_TOKENS).request()
        return body, asked_of(request, served, body)

    body, asked = await read_json(request, served, parse)
    async with counted(request) as admitted:
        call = await call_of(request, served, body, asked)
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
)
