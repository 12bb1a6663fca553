"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import repeat
from typing import Any

from starlette.requests import Request
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.generating.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    FinishReason,
)
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.chat_body import DECODER, ChatCompletionRequest
from vllmx_server.generating.chat_call import ChatCall, chat_call, submit_chat
from vllmx_server.generating.chat_events import ReadStream, WholeAnswer
from vllmx_server.generating.chunks import Chunks, PlainChunks, deltas
from vllmx_server.generating.generate import Answer, generate
from vllmx_server.generating.generation import Generation, request_timings
from vllmx_server.generating.logprobs import chat_logprobs, prompt_logprobs
from vllmx_server.generating.served import Served
from vllmx_server.generating.tools import is_named_tool
from vllmx_server.http.event_stream import HeldResponse
from vllmx_server.http.operation import GENERATES, GENERATING, HELLO, Events
from vllmx_server.schema.record import json_pieces, lazily


async def chat_completions(request: Request) -> HeldResponse:
    """OpenAI's chat completion, streamed or not."""
    return await generate(request, DECODER, chat_call, _submit, ChatAnswer)


async def _submit(
    request: Request, served: Served, body: ChatCompletionRequest, call: ChatCall
) -> list[RequestStream]:
    return await submit_chat(request, served, call)


class ChatAnswer(Answer):
    """Makes the wire format of one request's outputs."""

    def __init__(
        self, served: Served, body: ChatCompletionRequest, request_id: str, generation: Generation
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._state = served
        self._body = body
        self._generation = generation
        self._created = int(time.time())
        self._has_reasoning = body.include_reasoning is not False
        self._readers = generation.readers
        self._readings = self._new_readings() if body.stream else []
        self._chunks = Chunks(
            "chat.completion.chunk",
            self._id,
            self._created,
            served,
            body.stream_options,
            body.model,
        )
        count = (body.n or 1) if body.stream else 0
        self._plain = [PlainChunks(self._chunks, index) for index in range(count)]

    async def whole(self) -> Iterator[bytes]:
        (final,) = await self._generation.finals()
        read: list[WholeAnswer] = []
        if self._readers is not None:
            read = [await WholeAnswer.read(self._readers, choice) for choice in final.outputs]
            if self._readers.has_thinking:
                tokens = sum(each.num_reasoning_tokens for each in read)
                self._generation.usage.reasoning_tokens = tokens
        return json_pieces(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._state.called(self._body.model),
                choices=lazily(map(self._choice, final.outputs, read or repeat(None))),
                system_fingerprint=self._state.fingerprint,
                usage=self._generation.usage.shown(),
                prompt_logprobs=prompt_logprobs(final.prompt_logprobs),
                prompt_token_ids=final.prompt_token_ids if self._body.return_token_ids else None,
                metrics=request_timings(self._state.config, self._generation),
            )
        )

    def _choice(self, choice: CompletionOutput, read: WholeAnswer | None) -> ChatChoice:
        if read is None:
            message = AssistantMessage(content=self._echoed() + choice.text)
        else:
            assert self._readers is not None
            has_reasoning = self._has_reasoning and self._readers.has_thinking
            message = read.message(self._echoed(), has_reasoning=has_reasoning)
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice),
            finish_reason=self._finish_reason(choice, read),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._body.return_token_ids else None,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        usage, chunks = self._generation.usage, self._chunks
        readings, is_plain, begun = self._readings, self.has_middle, False
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                if not begun:
                    begun = True
                    yield self._roles(chunks)
                num_unsent = sum(len(choice.token_ids) for choice in output.outputs)
                for choice in output.outputs:
                    num_unsent -= len(choice.token_ids)
                    if readings:
                        reading = readings[choice.index]
                        if chunk := self._read_chunks(choice, reading, is_plain, num_unsent):
                            yield chunk
                    elif choice.finish_reason is not None or not is_plain:
                        yield chunks.chunk(self._delta(choice), usage, num_unsent)
                    elif choice.text:
                        yield self._plain[choice.index].content(choice.text)
        yield chunks.end(self._generation)

    @property
    def has_middle(self) -> bool:
        body = self._body
        has_more = body.num_logprobs is not None or body.return_token_ids or self._chunks.has_usage
        return not has_more

    def middle(self, text: str, ids: list[int]) -> bytes:
        if not self._readings:
            return self._plain[0].content(text) if text else b""
        reading, usage = self._readings[0], self._generation.usage
        events = reading.more(text, ids)
        if usage.reasoning_tokens is not None:
            usage.reasoning_tokens += reading.num_new_reasoning_tokens
        return b"".join(map(self._plain[0].of, events))

    def _new_readings(self) -> list[ReadStream]:
        """One for each choice of a stream that is read."""
        if self._readers is None:
            return []
        if self._readers.has_thinking:
            self._generation.usage.reasoning_tokens = 0
        hides = not self._has_reasoning
        return [ReadStream(self._readers, hides_reasoning=hides) for _ in range(self._body.n or 1)]

    def _read_chunks(
        self, choice: CompletionOutput, reading: ReadStream, is_plain: bool, num_unsent: int
    ) -> bytes:
        """A chunk for each part of the message that an output adds; maybe none."""
        events, usage, chunks = reading.events(choice), self._generation.usage, self._chunks
        if usage.reasoning_tokens is not None:
            usage.reasoning_tokens += reading.num_new_reasoning_tokens
        if is_plain and choice.finish_reason is None:
            return b"".join(map(self._plain[choice.index].of, events))
        found: list[dict[str, Any]] = [
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas(events)
        ]
        found[0] |= self._beside(choice)
        if choice.finish_reason is not None:
            found[-1] |= {
                "finish_reason": self._finish_reason(choice, reading),
                "stop_reason": choice.stop_reason,
            }
        return b"".join(chunks.chunk(each, usage, num_unsent) for each in found)

    def _finish_reason(
        self, choice: CompletionOutput, read: ReadStream | WholeAnswer | None
    ) -> FinishReason | None:
        """The reason as OpenAI gives it: the answer to a call that the request named ends by
        "stop"."""
        is_named = is_named_tool(self._body.tool_choice)
        return choice.finish_reason if read is None or is_named else read.finish_reason(choice)

    def _beside(self, choice: CompletionOutput) -> dict[str, Any]:
        """A chunk's fields about its tokens, in the order of chunks whose text is not parsed."""
        found: dict[str, Any] = {"logprobs": self._logprobs(choice)}
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _roles(self, chunks: Chunks) -> bytes:
        """The first chunk of every choice, which has no text yet."""
        delta = {"role": "assistant", "content": self._echoed()}
        fixed = {"delta": delta, "logprobs": None, "finish_reason": None}
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = self._generation.prompt_token_ids[0]
        usage = self._generation.usage
        return b"".join(
            chunks.chunk({"index": index, **fixed}, usage, usage.completion_tokens, **extra)
            for index in range(self._body.n or 1)
        )

    def _delta(self, choice: CompletionOutput) -> dict[str, Any]:
        ended = choice.finish_reason is not None
        found: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": choice.text} if choice.text or not ended else {},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        if ended:
            found["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        top = self._body.num_logprobs
        if choice.logprobs is None or top is None:
            return None
        if self._body.logprob_token_ids:
            top = -1  # all that are there
        tokenizer = self._state.llm.tokenizer
        as_ids = self._body.return_tokens_as_token_ids
        return chat_logprobs(choice.logprobs, choice.token_ids, top, tokenizer, as_ids)

    def _echoed(self) -> str:
        """The final message, which the answer goes on with, where echo asks for it."""
        if not self._body.echo:
            return ""
        content = self._body.messages[-1].content
        return content if isinstance(content, str) else ""


class ChatApi(Api):
    routes = (
        keyed(
            "POST",
            "/v1/chat/completions",
            chat_completions,
            GENERATING,
            ChatCompletion,
            ChatCompletionRequest,
            events=Events(ChatChunk, is_named=False, ends_with="[DONE]"),
            statuses=GENERATES,
            example={"messages": HELLO, "max_tokens": 16},
            task="generate",
            of_model=True,
            span="chat",
        ),
    )
