"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.logprob_limit import check_logprobs
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.client.rule_limit import check_rules
from vllmx_engine.text.output import prompt_offsets
from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

from vllmx_server.chunks import Chunks, encode
from vllmx_server.event_stream import DONE, HeldResponse
from vllmx_server.generation import Generation
from vllmx_server.json_pieces import Items, json_pieces
from vllmx_server.logprobs import CompletionLogprobs, prompt_logprobs
from vllmx_server.routes.generate import generate
from vllmx_server.schema.completions import DECODER, CompletionRequest
from vllmx_server.state import ServerState, caller_of


async def completions(request: Request) -> HeldResponse:
    """OpenAI's text completion for one or several prompts, streamed or not."""
    return await generate(request, DECODER, _submit, CompletionAnswer)


async def _submit(
    request: Request, state: ServerState, body: CompletionRequest
) -> list[RequestStream]:
    """One engine request for each prompt; all or none. Raises what the engine refuses."""
    params, prompts = _params(state, body), body.prompts()
    check_rules(params, len(prompts))
    state.llm.check_open(len(prompts) * params.num_choices)
    streams: list[RequestStream] = []
    try:
        for prompt in prompts:
            stream = await state.llm.submit(
                prompt,
                params,
                kind="delta" if body.stream else "final",
                add_special_tokens=body.add_special_tokens is not False,
                fit_max_tokens=not isinstance(body.max_tokens, int),
                **caller_of(request, body),
            )
            streams.append(stream)
            check_logprobs(params, [stream.request.lengths for stream in streams])
            await asyncio.sleep(0)  # tokenizing many prompts must not hold up other requests
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    params = body.sampling_params(
        state.llm.default_sampling_params,
        max_tokens=body.token_limit,
        logprobs=body.logprobs,
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        return dataclasses.replace(params, prompt_logprobs=body.logprobs)
    return params


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before each of its choices."""

    output: RequestOutput
    text: str
    offsets: Sequence[int]
    """Of the prompt's tokens in it."""


class CompletionAnswer:
    """Makes the wire format of one request's outputs. Choice j of prompt i has index i * n + j."""

    def __init__(
        self, state: ServerState, body: CompletionRequest, request_id: str, generation: Generation
    ) -> None:
        self._id = f"cmpl-{request_id}"
        self._state = state
        self._body = body
        self._generation = generation
        self._n = body.n or 1
        self._created = int(time.time())
        self._echoes: list[Echo] = []
        """Of each prompt, with echo."""

    async def whole(self) -> Iterator[bytes]:
        """The body of an answer that is not streamed, in pieces."""
        finals = await self._generation.finals()
        if self._body.echo:
            self._echoes = await asyncio.to_thread(lambda: list(map(self._echo_of, finals)))
        usage = self._generation.usage
        if self._body.scores_only:
            usage.completion_tokens = 0
        return json_pieces(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._created,
                "model": self._state.llm.config.name,
                "choices": Items(
                    self._choice(index, final, choice)
                    for index, final in enumerate(finals)
                    for choice in final.outputs
                ),
                "system_fingerprint": self._state.fingerprint,
                "usage": usage.as_dict(),
            }
        )

    def _choice(self, index: int, final: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        echo = self._echoes[index] if self._body.echo else None
        echoed = "" if echo is None else echo.text
        found: dict[str, Any] = {
            "index": index * self._n + choice.index,
            "text": echoed if self._body.scores_only else echoed + choice.text,
            "logprobs": self._logprobs(choice, len(echoed), echo),
            "finish_reason": "length" if self._body.scores_only else choice.finish_reason,
            "stop_reason": None if self._body.scores_only else choice.stop_reason,
        }
        asked = self._body.prompt_logprobs is not None  # echo scores the prompt for itself
        found["prompt_logprobs"] = prompt_logprobs(final.prompt_logprobs if asked else None)
        found["token_ids"] = found["prompt_token_ids"] = None
        if self._body.return_token_ids:
            found["token_ids"] = [] if self._body.scores_only else choice.token_ids
            found["prompt_token_ids"] = final.prompt_token_ids
        return found

    def _logprobs(
        self, choice: CompletionOutput, shift: int, echo: Echo | None = None
    ) -> dict[str, Any] | None:
        """Of the choice's tokens, with echo after those of the prompt. `shift`: characters before
        the choice's text."""
        if self._body.logprobs is None or choice.logprobs is None:
            return None
        rows = CompletionLogprobs(self._state.llm.tokenizer, self._body.return_tokens_as_token_ids)
        if echo is not None and echo.output.prompt_logprobs is not None:
            rows.add(echo.output.prompt_token_ids, echo.output.prompt_logprobs, echo.offsets)
        if not self._body.scores_only:
            offsets = choice.text_offsets or [0] * len(choice.token_ids)
            rows.add(choice.token_ids, choice.logprobs, offsets, shift)
        return rows.as_dict()

    def _echo_of(self, output: RequestOutput) -> Echo:
        text = self._prompt_text(output)
        offsets: Sequence[int] = ()
        if self._body.logprobs is not None:
            offsets = prompt_offsets(self._state.llm.tokenizer, output.prompt_token_ids, text)
        return Echo(output, text, offsets)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._state.llm.tokenizer.decode(output.prompt_token_ids)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer with their SSE framing; none before the engine's first
        output."""
        body, usage = self._body, self._generation.usage
        name = self._state.llm.config.name
        chunks = Chunks(
            "text_completion",
            self._id,
            self._created,
            name,
            body.stream_options,
            self._state.fingerprint,
        )
        is_plain = not (body.logprobs is not None or body.return_token_ids or chunks.has_usage)
        begun: set[int] = set()
        async with aclosing(self._generation.outputs()) as outputs:
            async for index, output in outputs:
                for choice in output.outputs:
                    number = index * self._n + choice.index
                    if choice.finish_reason is not None or not is_plain or number not in begun:
                        is_first = number not in begun
                        begun.add(number)
                        if body.scores_only:
                            usage.completion_tokens = 0
                        delta = self._delta(number, choice, output, is_first)
                        yield chunks.chunk(delta, usage)
                    elif choice.text:
                        yield b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b' % (
                            chunks.head, number, encode(choice.text), chunks.tail,
                        )  # fmt: skip
        if chunks.has_last_usage:
            yield chunks.usage(usage)
        yield DONE

    def _delta(
        self, number: int, choice: CompletionOutput, output: RequestOutput, is_first: bool
    ) -> dict[str, Any]:
        echoed = self._prompt_text(output) if is_first and self._body.echo else ""
        scores_only = self._body.scores_only
        found: dict[str, Any] = {
            "index": number,
            "text": echoed if scores_only else echoed + choice.text,
            "logprobs": self._logprobs(choice, 0),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            found["finish_reason"] = "length" if scores_only else choice.finish_reason
            found["stop_reason"] = None if scores_only else choice.stop_reason
        if self._body.return_token_ids:
            found["token_ids"] = [] if scores_only else choice.token_ids
            if is_first:
                found["prompt_token_ids"] = output.prompt_token_ids
        return found
