"""POST /v1/completions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.request_stream import RequestStream
from vllmx_engine.outputs import CompletionOutput, RequestOutput

from vllmx_server.body import read_body
from vllmx_server.event_stream import DONE, EventStream, HeldResponse, JSONAnswer
from vllmx_server.generation import Usage, outputs_of
from vllmx_server.logprobs import CompletionLogprobs, prompt_logprobs
from vllmx_server.schema.completions import DECODER, CompletionRequest
from vllmx_server.schema.decode import decode
from vllmx_server.state import ServerState, caller_of, request_id_of, state_of

_encode = msgspec.json.Encoder().encode


async def completions(request: Request) -> HeldResponse:
    """OpenAI's text completion for one or several prompts, streamed or not."""
    state = state_of(request)
    body = decode(await read_body(request, state.config.max_body_bytes), DECODER)
    state.check_model(body.model)
    body.check()
    answer = CompletionAnswer(state, body, f"cmpl-{request_id_of(request, body)}")
    release = state.admit()
    try:
        streams = await answer.submit(request)
    except BaseException:
        release()
        raise
    if body.stream:
        return EventStream(answer.events(streams), release)
    return JSONAnswer(answer.whole(streams), release)


class CompletionAnswer:
    """Makes the wire format of one request's outputs. Choice j of prompt i has index i * n + j."""

    def __init__(self, state: ServerState, body: CompletionRequest, answer_id: str) -> None:
        self.id = answer_id
        self._state = state
        self._body = body
        self._n = body.n or 1
        self._created = int(time.time())
        self._score_only = body.echo and body.max_tokens == 0
        options = body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        head = _encode({"id": self.id, "object": "text_completion"})[:-1]
        model = _encode(state.llm.config.name)
        self._head = b"data: %b,\"created\":%d,\"model\":%b,\"choices\":[" % (
            head, self._created, model,
        )  # fmt: skip

    async def submit(self, request: Request) -> list[RequestStream]:
        """One engine request for each prompt; all or none. Raises what the engine refuses."""
        body, llm = self._body, self._state.llm
        if body.stream and body.echo and body.logprobs is not None:
            raise InvalidRequestError(
                "echo with logprobs cannot be streamed: leave out stream", param="echo"
            )
        params = body.sampling_params(
            llm.default_sampling_params,
            # One token is drawn and dropped: the model must run to score the prompt.
            max_tokens=1 if self._score_only else body.max_tokens,
            logprobs=body.logprobs,
        )
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
        streams: list[RequestStream] = []
        try:
            for index, prompt in enumerate(body.prompts()):
                streams.append(
                    await llm.submit(
                        prompt,
                        params,
                        kind="delta" if body.stream else "final",
                        request_id=self.id if index == 0 else f"{self.id}-{index}",
                        add_special_tokens=body.add_special_tokens,
                        **caller_of(request, body),
                    )
                )
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def whole(self, streams: Sequence[RequestStream]) -> bytes:
        """The body of an answer that is not streamed."""
        usage = Usage(streams)
        finals: dict[int, RequestOutput] = {}
        async for index, output in outputs_of(streams, self._state.metrics, usage):
            finals[index] = output
        if self._score_only:
            usage.completion_tokens = 0
        choices = [
            self._choice(index, finals[index], choice)
            for index in sorted(finals)
            for choice in finals[index].outputs
        ]
        return _encode(
            {
                "id": self.id,
                "object": "text_completion",
                "created": self._created,
                "model": self._state.llm.config.name,
                "choices": choices,
                "usage": usage.as_dict(),
            }
        )

    def _choice(self, index: int, final: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        echoed = self._prompt_text(final) if self._body.echo else ""
        found: dict[str, Any] = {
            "index": index * self._n + choice.index,
            "text": echoed if self._score_only else echoed + choice.text,
            "logprobs": self._logprobs(final, choice, len(echoed)),
            "finish_reason": "length" if self._score_only else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None and final.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(final.prompt_logprobs)
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
            found["prompt_token_ids"] = final.prompt_token_ids
        return found

    def _logprobs(
        self, final: RequestOutput | None, choice: CompletionOutput, shift: int
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None or choice.logprobs is None:
            return None
        rows = CompletionLogprobs()
        if self._body.echo and final is not None and final.prompt_logprobs is not None:
            self._add_prompt(rows, final)
        if not self._score_only:
            offsets = choice.text_offsets or [0] * len(choice.token_ids)
            for token, row, offset in zip(choice.token_ids, choice.logprobs, offsets, strict=True):
                rows.add(token, row, shift + offset)
        return rows.as_dict()

    def _add_prompt(self, rows: CompletionLogprobs, final: RequestOutput) -> None:
        tokenizer, offset = self._state.llm.tokenizer, 0
        for token, row in zip(final.prompt_token_ids, final.prompt_logprobs or [], strict=True):
            if row is None:
                rows.add_first_prompt_token(tokenizer.token_text(token))
            else:
                rows.add(token, row, offset)
            offset += len(tokenizer.token_text(token))

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._state.llm.tokenizer.decode(output.prompt_token_ids)

    async def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer with their SSE framing."""
        usage = Usage(streams)
        echoed: set[int] = set()
        outputs = outputs_of(streams, self._state.metrics, usage)
        try:
            async for index, output in outputs:
                for choice in output.outputs:
                    number = index * self._n + choice.index
                    prefix = ""
                    if self._body.echo and number not in echoed:
                        echoed.add(number)
                        prefix = self._prompt_text(output)
                    event = self._event(number, prefix, choice, usage)
                    if event is not None:
                        yield event
        finally:
            await outputs.aclose()
        if self._usage_at_end:
            yield self._head + b'],"usage":%b}\n\n' % _encode(usage.as_dict())
        yield DONE

    def _event(
        self, number: int, prefix: str, choice: CompletionOutput, usage: Usage
    ) -> bytes | None:
        text = prefix if self._score_only else prefix + choice.text
        plain = not (choice.logprobs or self._body.return_token_ids or self._usage_always)
        if plain and choice.finish_reason is None:
            if not text:
                return None
            return (
                self._head
                + b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n'
                % (number, _encode(text))
            )
        found: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": self._logprobs(None, choice, 0),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            found["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        tail = b"]" if not self._usage_always else b'],"usage":%b' % _encode(usage.as_dict())
        return self._head + _encode(found) + tail + b"}\n\n"
