"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import MAX_LOGPROBS
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.wire.outputs import CompletionOutput

from vllmx_server.body import body_bytes
from vllmx_server.chunks import Chunks, encode
from vllmx_server.event_stream import DONE, HeldResponse
from vllmx_server.generation import Generation
from vllmx_server.json_pieces import Items, json_pieces
from vllmx_server.logprobs import chat_logprobs, prompt_logprobs
from vllmx_server.routes.generate import generate
from vllmx_server.schema.chat import DECODER, ChatCompletionRequest
from vllmx_server.state import ServerState, caller_of


async def chat_completions(request: Request) -> HeldResponse:
    """OpenAI's chat completion, streamed or not."""
    return await generate(request, DECODER, _submit, ChatAnswer)


async def _submit(
    request: Request, state: ServerState, body: ChatCompletionRequest
) -> list[RequestStream]:
    if body.num_logprobs is not None and not 0 <= body.num_logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.num_logprobs}",
            param="top_logprobs",
        )
    llm = state.llm
    limit = body.token_limit
    if limit is None:
        limit = llm.default_sampling_params.get("max_tokens")
    params = body.sampling_params(
        llm.default_sampling_params, max_tokens=limit, logprobs=body.num_logprobs
    )
    stream = await llm.submit_chat(
        body.conversation(),
        params,
        chat=body.chat_options(),
        kind="delta" if body.stream else "final",
        add_special_tokens=bool(body.add_special_tokens),
        fit_max_tokens=body.token_limit is None,  # what the model recommends is no one's mistake
        num_bytes=body_bytes(request),
        **caller_of(request, body),
    )
    return [stream]


class ChatAnswer:
    """Makes the wire format of one request's outputs."""

    def __init__(
        self,
        state: ServerState,
        body: ChatCompletionRequest,
        request_id: str,
        generation: Generation,
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._state = state
        self._body = body
        self._generation = generation
        self._created = int(time.time())

    async def whole(self) -> Iterator[bytes]:
        """The body of an answer that is not streamed, in pieces."""
        (final,) = await self._generation.finals()
        body: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._state.llm.config.name,
            "choices": Items(map(self._choice, final.outputs)),
            "system_fingerprint": self._state.fingerprint,
            "usage": self._generation.usage.as_dict(),
            "prompt_logprobs": prompt_logprobs(final.prompt_logprobs),
            "prompt_token_ids": final.prompt_token_ids if self._body.return_token_ids else None,
        }
        return json_pieces(body)

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._echoed() + choice.text, "refusal": None}
        found: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
        }
        return found

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer with their SSE framing; none before the engine's first
        output."""
        body, usage = self._body, self._generation.usage
        name = self._state.llm.config.name
        chunks = Chunks(
            "chat.completion.chunk",
            self._id,
            self._created,
            name,
            body.stream_options,
            self._state.fingerprint,
        )
        is_plain = not (body.num_logprobs is not None or body.return_token_ids or chunks.has_usage)
        begun = False
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                if not begun:
                    begun = True
                    yield self._roles(chunks)
                for choice in output.outputs:
                    if choice.finish_reason is not None or not is_plain:
                        yield chunks.chunk(self._delta(choice), usage)
                    elif choice.text:
                        yield (
                            b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,'
                            b'"finish_reason":null}%b'
                        ) % (chunks.head, choice.index, encode(choice.text), chunks.tail)
        if chunks.has_last_usage:
            yield chunks.usage(usage)
        yield DONE

    def _roles(self, chunks: Chunks) -> bytes:
        """The first chunk of every choice."""
        delta = {"role": "assistant", "content": self._echoed()}
        fixed = {"delta": delta, "logprobs": None, "finish_reason": None}
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = self._generation.prompt_token_ids[0]
        usage = self._generation.usage
        return b"".join(
            chunks.chunk({"index": index, **fixed}, usage, **extra)
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

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        top = self._body.num_logprobs
        if choice.logprobs is None or top is None:
            return None
        tokenizer = self._state.llm.tokenizer
        as_ids = self._body.return_tokens_as_token_ids
        return chat_logprobs(choice.logprobs, choice.token_ids, top, tokenizer, as_ids)

    def _echoed(self) -> str:
        """With echo: the final message, which the answer goes on with."""
        if not self._body.echo:
            return ""
        content = self._body.messages[-1].content
        return content if isinstance(content, str) else ""
