"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import MAX_LOGPROBS
from vllmx_engine.request_stream import RequestStream
from vllmx_engine.outputs import CompletionOutput, RequestOutput

from vllmx_server.body import read_body
from vllmx_server.event_stream import DONE, EventStream, HeldResponse, JSONAnswer
from vllmx_server.generation import Usage, outputs_of
from vllmx_server.logprobs import chat_logprobs, prompt_logprobs
from vllmx_server.schema.chat import DECODER, ChatCompletionRequest
from vllmx_server.schema.decode import decode
from vllmx_server.state import ServerState, caller_of, request_id_of, state_of

_encode = msgspec.json.Encoder().encode


async def chat_completions(request: Request) -> HeldResponse:
    """OpenAI's chat completion, streamed or not."""
    state = state_of(request)
    body = decode(await read_body(request, state.config.max_body_bytes), DECODER)
    state.check_model(body.model)
    body.check()
    answer = ChatAnswer(state, body, f"chatcmpl-{request_id_of(request, body)}")
    release = state.admit()
    try:
        stream = await _submit(request, state, body, answer.id)
    except BaseException:
        release()
        raise
    if body.stream:
        return EventStream(answer.events(stream), release)
    return JSONAnswer(answer.whole(stream), release)


async def _submit(
    request: Request, state: ServerState, body: ChatCompletionRequest, request_id: str
) -> RequestStream:
    if body.num_logprobs is not None and body.num_logprobs > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.num_logprobs}",
            param="top_logprobs",
        )
    llm = state.llm
    params = body.sampling_params(
        llm.default_sampling_params, max_tokens=body.token_limit, logprobs=body.num_logprobs
    )
    return await llm.submit_chat(
        body.conversation(),
        params,
        chat=body.chat_options(),
        kind="delta" if body.stream else "final",
        request_id=request_id,
        **caller_of(request, body),
    )


class ChatAnswer:
    """Makes the wire format of one request's outputs."""

    def __init__(self, state: ServerState, body: ChatCompletionRequest, answer_id: str) -> None:
        self.id = answer_id
        self._state = state
        self._body = body
        self._created = int(time.time())
        options = body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        # Everything in a chunk that does not change is encoded once.
        head = _encode({"id": self.id, "object": "chat.completion.chunk"})[:-1]
        model = _encode(state.llm.config.name)
        self._head = b"data: %b,\"created\":%d,\"model\":%b,\"choices\":[" % (
            head, self._created, model,
        )  # fmt: skip

    async def whole(self, stream: RequestStream) -> bytes:
        """The body of an answer that is not streamed."""
        usage = Usage([stream])
        final: RequestOutput | None = None
        async for _, output in outputs_of([stream], self._state.metrics, usage):
            final = output
        assert final is not None
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._state.llm.config.name,
            "choices": [self._choice(choice) for choice in final.outputs],
            "usage": usage.as_dict(),
        }
        if final.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(final.prompt_logprobs)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = final.prompt_token_ids
        return _encode(body)

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._echoed() + choice.text, "refusal": None}
        found: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    async def events(self, stream: RequestStream) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer with their SSE framing."""
        usage = Usage([stream])
        for index in range(self._body.n or 1):
            yield self._chunk({"role": "assistant", "content": self._echoed()}, index)
        outputs = outputs_of([stream], self._state.metrics, usage)
        try:
            async for _, output in outputs:
                for choice in output.outputs:
                    event = self._event(choice, usage)
                    if event is not None:
                        yield event
        finally:
            await outputs.aclose()
        if self._usage_at_end:
            yield self._head + b'],"usage":%b}\n\n' % _encode(usage.as_dict())
        yield DONE

    def _event(self, choice: CompletionOutput, usage: Usage) -> bytes | None:
        plain = not (choice.logprobs or self._body.return_token_ids or self._usage_always)
        if plain and choice.finish_reason is None:
            if not choice.text:
                return None
            return (
                self._head
                + b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]}\n\n'
                % (choice.index, _encode(choice.text))
            )
        delta = {"content": choice.text} if choice.text or choice.finish_reason is None else {}
        return self._chunk(delta, choice.index, choice, usage if self._usage_always else None)

    def _chunk(
        self,
        delta: dict[str, str],
        index: int,
        choice: CompletionOutput | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        found: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(choice) if choice else None,
            "finish_reason": choice.finish_reason if choice else None,
        }
        if choice is not None and choice.finish_reason is not None:
            found["stop_reason"] = choice.stop_reason
        if choice is not None and self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        tail = b"]" if usage is None else b'],"usage":%b' % _encode(usage.as_dict())
        return self._head + _encode(found) + tail + b"}\n\n"

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        if choice.logprobs is None or self._body.num_logprobs is None:
            return None
        return chat_logprobs(
            choice.logprobs,
            choice.token_ids,
            self._body.num_logprobs,
            self._state.llm.tokenizer,
        )

    def _echoed(self) -> str:
        """With echo: the final message, which the answer goes on with."""
        if not self._body.echo:
            return ""
        content = self._body.messages[-1].content
        return content if isinstance(content, str) else ""
