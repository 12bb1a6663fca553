"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import VllmxError
from vllmx_engine.client.chat import ChatOptions
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.apis.messages.answers import (
    ContentBlock,
    CountedTokens,
    Message,
    MessageDelta,
    MessagesEvent,
    MessageStart,
    MessagesUsage,
    Stop,
)
from vllmx_server.apis.messages.as_chat import chat_of
from vllmx_server.apis.messages.blocks import BlockEvents, Blocks
from vllmx_server.apis.messages.schema import (
    BETA_COUNT_TOKENS,
    BETA_MESSAGES,
    COUNT_TOKENS,
    MESSAGES,
    CountTokensRequest,
    MessagesRequest,
)
from vllmx_server.errors import messages_error_body
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.chat_call import ChatCall, chat_call, prompt_tokens, submit_chat
from vllmx_server.generating.chat_events import ChatEvents
from vllmx_server.generating.field_names import MESSAGES_FIELDS
from vllmx_server.generating.generate import Answer, generate
from vllmx_server.generating.generation import Generation
from vllmx_server.generating.reading import checked, counted, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.event_stream import Framing, HeldResponse
from vllmx_server.http.operation import BODY, GENERATES, GENERATING, HELLO, TEXT, Events
from vllmx_server.schema.record import encode


def _failed(error: VllmxError) -> bytes:
    return b"event: error\ndata: " + messages_error_body(error) + b"\n\n"


FRAMING = Framing(_failed, b'event: ping\ndata: {"type":"ping"}\n\n')


async def messages(request: Request) -> HeldResponse:
    """Anthropic's Messages, streamed or not."""
    decoder = BETA_MESSAGES if _is_beta(request) else MESSAGES
    return await generate(request, decoder, _call, _submit, MessagesAnswer, FRAMING)


def _is_beta(request: Request) -> bool:
    return bool(request.headers.get("anthropic-beta", "").strip())


def _call(served: Served, body: MessagesRequest) -> ChatCall:
    """`max_tokens` must be given in this API, and clients give what larger models hold: what the
    context cannot hold is cut. A budget for thoughts is nothing to a model without thoughts."""
    chat = chat_of(body)
    with MESSAGES_FIELDS.told():
        chat.check()
        call = chat_call(served, chat, fit=True)
    return replace(call, options=replace(call.options, needs_budget=False))


async def _submit(
    request: Request, served: Served, body: MessagesRequest, call: ChatCall
) -> list[RequestStream]:
    with MESSAGES_FIELDS.told():
        return await submit_chat(request, served, call, by_events=True)


async def count_tokens(request: Request) -> Response:
    """Counts the tokens in the prompt of a Messages request."""
    served = served_of(request)
    decoder = BETA_COUNT_TOKENS if _is_beta(request) else COUNT_TOKENS

    def parse(data: bytes) -> tuple[list[dict[str, Any]], ChatOptions]:
        chat = chat_of(checked(data, served, decoder))
        with MESSAGES_FIELDS.told():
            chat.check()
        return chat.conversation(), chat.chat_options()

    conversation, options = await read_json(request, served, parse)
    async with counted(request) as admitted:
        tokens = await prompt_tokens(request, served, conversation, options)
        admitted.num_tokens = len(tokens)
    return Response(encode(CountedTokens(input_tokens=len(tokens))), media_type="application/json")


class MessagesAnswer(Answer):
    """Makes the wire format of one request's outputs."""

    def __init__(
        self, served: Served, body: MessagesRequest, request_id: str, generation: Generation
    ) -> None:
        self._id = f"msg_{request_id}"
        self._state = served
        self._body = body
        self._generation = generation
        self._events = ChatEvents(generation)
        self._blocks = BlockEvents()

    async def whole(self) -> Iterator[bytes]:
        blocks = Blocks()
        async with aclosing(self._events.all()) as events:
            async for event in events:
                blocks.add(event)
        stop = blocks.stop(self._cut_by_context())
        return iter((encode(self._message(blocks.content, stop, done=True)),))

    async def events(self) -> AsyncGenerator[bytes, None]:
        blocks, begun = self._blocks, False
        async with aclosing(self._events.all()) as events:
            async for event in events:
                if not begun:
                    begun = True
                    yield self._start()
                data = blocks.of(event)
                if data:
                    yield data
        stop = blocks.stop(self._cut_by_context())
        delta = MessageDelta(delta=stop, usage=self._usage(done=True))
        yield (
            b"event: message_delta\ndata: %b\n\n"
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        ) % encode(delta)

    has_middle = True

    def middle(self, text: str, ids: list[int]) -> bytes:
        return b"".join([self._blocks.of(event) for event in self._events.more(text, ids)])

    def _start(self) -> bytes:
        message = self._message([], Stop(stop_reason=None, stop_sequence=None), done=False)
        return b"event: message_start\ndata: %b\n\n%b" % (
            encode(MessageStart(message=message)),
            FRAMING.ping,
        )

    def _message(self, content: list[ContentBlock], stop: Stop, *, done: bool) -> Message:
        return Message(
            id=self._id,
            model=self._state.called(self._body.model),
            content=content,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=self._usage(done=done),
        )

    def _usage(self, *, done: bool) -> MessagesUsage:
        usage = self._generation.usage
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens if done else min(1, usage.completion_tokens),
        )

    def _cut_by_context(self) -> bool:
        """The context ended before `max_tokens`."""
        return self._generation.usage.completion_tokens < self._body.max_tokens


class MessagesApi(Api):
    routes = (
        keyed(
            "POST",
            "/v1/messages",
            messages,
            GENERATING,
            Message,
            MessagesRequest,
            events=Events(MessagesEvent, is_named=True),
            statuses=GENERATES,
            example={"messages": HELLO, "max_tokens": 16},
            is_anthropic=True,
            task="generate",
            of_model=True,
            span="chat",
        ),
        keyed(
            "POST",
            "/v1/messages/count_tokens",
            count_tokens,
            TEXT,
            CountedTokens,
            CountTokensRequest,
            statuses=(*BODY, 404),
            example={"messages": HELLO},
            is_anthropic=True,
            task="generate",
            of_model=True,
        ),
    )
