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
from vllmx_engine.client.request_limits import check_rules
from vllmx_engine.client.request_state import MAX_DELTA_ROWS
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.text.output import prompt_offsets
from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

from vllmx_server.apis.completions.schema import (
    DECODER,
    CompletionRequest,
    TextChoice,
    TextChunk,
    TextCompletion,
)
from vllmx_server.generating.answers import TextLogprobs
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.chunks import Chunks
from vllmx_server.generating.filling import filled
from vllmx_server.generating.generate import Answer, generate
from vllmx_server.generating.generation import Generation, request_timings
from vllmx_server.generating.logprobs import CompletionLogprobs, prompt_logprobs
from vllmx_server.generating.reading import caller_of
from vllmx_server.generating.served import Served
from vllmx_server.http.event_stream import HeldResponse
from vllmx_server.http.operation import GENERATES, GENERATING, Events
from vllmx_server.schema.record import encode, json_pieces, lazily


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed body."""

    prompts: list[str | list[int]]
    params: SamplingParams


async def completions(request: Request) -> HeldResponse:
    """OpenAI's text completion for one or several prompts, streamed or not."""
    return await generate(request, DECODER, _asked, _submit, CompletionAnswer)


def _asked(served: Served, body: CompletionRequest) -> Asked:
    prompts = body.prompts()
    if body.suffix:
        prompts = filled(served, prompts, body.suffix)
    asked = Asked(prompts, _params(served, body))
    check_rules(asked.params, len(asked.prompts))
    return asked


async def _submit(
    request: Request, served: Served, body: CompletionRequest, asked: Asked
) -> list[RequestStream]:
    """One engine request for each prompt; all or none. Raises what the engine refuses."""
    return await served.llm.submit_all(
        asked.prompts,
        asked.params,
        kind="delta" if body.stream else "final",
        options=caller_of(request, body),
        add_special_tokens=body.add_special_tokens is not False,
        fit_max_tokens=not isinstance(body.max_tokens, int),
        beams=body.beams(asked.params),
    )


def _params(served: Served, body: CompletionRequest) -> SamplingParams:
    params = body.sampling_params(
        served.llm.default_sampling_params, max_tokens=body.token_limit, logprobs=body.logprobs
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
    """The offsets in it at which the prompt's tokens begin."""


class CompletionAnswer(Answer):
    """Makes the wire format of one request's outputs. Choice j of prompt i has index i * n + j."""

    def __init__(
        self, served: Served, body: CompletionRequest, request_id: str, generation: Generation
    ) -> None:
        self._id = f"cmpl-{request_id}"
        self._state = served
        self._body = body
        self._generation = generation
        self._n = body.n or 1
        self._created = int(time.time())
        self._echoes: list[Echo] = []
        """The echo of each prompt, if `echo` asks for it."""
        self._chunks = Chunks(
            "text_completion", self._id, self._created, served, body.stream_options, body.model
        )
        self._begin = b'%b{"index":0,"text":' % self._chunks.head
        self._end = b',"logprobs":null,"finish_reason":null}' + self._chunks.tail

    async def whole(self) -> Iterator[bytes]:
        finals = await self._generation.finals()
        if self._body.echo:
            self._echoes = await asyncio.to_thread(lambda: list(map(self._echo_of, finals)))
        usage = self._generation.usage
        if self._body.scores_only:
            usage.completion_tokens = 0
        return json_pieces(
            TextCompletion(
                id=self._id,
                created=self._created,
                model=self._state.called(self._body.model),
                choices=lazily(
                    self._choice(index, final, choice)
                    for index, final in enumerate(finals)
                    for choice in final.outputs
                ),
                system_fingerprint=self._state.fingerprint,
                usage=usage.shown(),
                metrics=request_timings(self._state.config, self._generation),
            )
        )

    def _choice(self, index: int, final: RequestOutput, choice: CompletionOutput) -> TextChoice:
        echo = self._echoes[index] if self._body.echo else None
        echoed = "" if echo is None else echo.text
        asked = self._body.prompt_logprobs is not None  # echo scores the prompt for itself
        found = TextChoice(
            index=index * self._n + choice.index,
            text=echoed if self._body.scores_only else echoed + choice.text,
            logprobs=self._logprobs(choice, len(echoed), echo),
            finish_reason="length" if self._body.scores_only else choice.finish_reason,
            stop_reason=None if self._body.scores_only else choice.stop_reason,
            prompt_logprobs=prompt_logprobs(final.prompt_logprobs if asked else None),
            token_ids=None,
            prompt_token_ids=None,
        )
        if self._body.return_token_ids:
            found.token_ids = [] if self._body.scores_only else choice.token_ids
            found.prompt_token_ids = final.prompt_token_ids
        return found

    def _logprobs(
        self, choice: CompletionOutput, shift: int, echo: Echo | None = None
    ) -> TextLogprobs | None:
        """Log-probabilities of the choice's tokens, with echo after those of the prompt. `shift`:
        characters before the choice's text."""
        if self._body.logprobs is None or choice.logprobs is None:
            return None
        rows = CompletionLogprobs(self._state.llm.tokenizer, self._body.return_tokens_as_token_ids)
        if echo is not None and echo.output.prompt_logprobs is not None:
            rows.add(echo.output.prompt_token_ids, echo.output.prompt_logprobs, echo.offsets)
        if not self._body.scores_only:
            offsets = choice.text_offsets or [0] * len(choice.token_ids)
            rows.add(choice.token_ids, choice.logprobs, offsets, shift)
        return rows.shown()

    def _echo_of(self, output: RequestOutput) -> Echo:
        text, tokenizer = output.prompt, self._state.llm.tokenizer
        if text is None:
            text = tokenizer.decode(output.prompt_token_ids)
        offsets: Sequence[int] = ()
        if self._body.logprobs is not None:
            offsets = prompt_offsets(tokenizer, output.prompt_token_ids, text)
        return Echo(output, text, offsets)

    async def events(self) -> AsyncGenerator[bytes, None]:
        body, usage, chunks = self._body, self._generation.usage, self._chunks
        is_plain = self.has_middle
        begun: set[int] = set()
        echoes: dict[int, Echo] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for index, output in outputs:
                if body.echo and index not in echoes:
                    echoes[index] = await asyncio.to_thread(self._echo_of, output)
                num_unsent = sum(len(choice.token_ids) for choice in output.outputs)
                for choice in output.outputs:
                    number = index * self._n + choice.index
                    echo = echoes.get(index)
                    if echo is not None and number not in begun:
                        for part in self._echo_parts(number, echo):
                            yield chunks.chunk(part, usage, num_unsent)
                            await asyncio.sleep(0)
                    num_unsent -= len(choice.token_ids)
                    if choice.finish_reason is not None or not is_plain or number not in begun:
                        is_first = number not in begun
                        begun.add(number)
                        if body.scores_only:
                            usage.completion_tokens = num_unsent = 0
                        delta = self._delta(number, choice, output, is_first, echo)
                        yield chunks.chunk(delta, usage, num_unsent)
                    elif choice.text:
                        begin = b'%b{"index":%d,"text":' % (chunks.head, number)
                        yield b"%b%b%b" % (begin, encode(choice.text), self._end)
        yield chunks.end(self._generation)

    @property
    def has_middle(self) -> bool:
        body = self._body
        has_more = body.logprobs is not None or body.return_token_ids or self._chunks.has_usage
        return not has_more

    def middle(self, text: str, ids: list[int]) -> bytes:
        return b"%b%b%b" % (self._begin, encode(text), self._end) if text else b""

    def _echo_parts(self, number: int, echo: Echo) -> Iterator[dict[str, Any]]:
        """The prompt, with its log-probabilities a few tokens at a time."""
        rows = echo.output.prompt_logprobs if self._body.logprobs is not None else None
        if rows is None:
            yield {"index": number, "text": echo.text, "logprobs": None, "finish_reason": None}
            return
        ids, offsets = echo.output.prompt_token_ids, [*echo.offsets, len(echo.text)]
        offsets[0] = 0
        for start in range(0, len(ids), MAX_DELTA_ROWS):
            end = min(len(ids), start + MAX_DELTA_ROWS)
            found = CompletionLogprobs(
                self._state.llm.tokenizer, self._body.return_tokens_as_token_ids
            )
            found.add(ids[start:end], rows[start:end], echo.offsets[start:end])
            yield {
                "index": number,
                "text": echo.text[offsets[start] : offsets[end]],
                "logprobs": found.shown(),
                "finish_reason": None,
            }

    def _delta(
        self,
        number: int,
        choice: CompletionOutput,
        output: RequestOutput,
        is_first: bool,
        echo: Echo | None,
    ) -> dict[str, Any]:
        scores_only = self._body.scores_only
        found: dict[str, Any] = {
            "index": number,
            "text": "" if scores_only else choice.text,
            "logprobs": self._logprobs(choice, 0 if echo is None else len(echo.text)),
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


class CompletionsApi(Api):
    routes = (
        keyed(
            "POST",
            "/v1/completions",
            completions,
            GENERATING,
            TextCompletion,
            CompletionRequest,
            events=Events(TextChunk, is_named=False, ends_with="[DONE]"),
            statuses=GENERATES,
            example={"prompt": "Once upon a time", "max_tokens": 16},
            task="generate",
            of_model=True,
            span="text_completion",
        ),
    )
