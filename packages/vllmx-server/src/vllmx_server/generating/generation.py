"""The engine's side of one HTTP request: its streams as one, their usage, latencies and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from vllmx_core.errors import VllmxError
from vllmx_engine.client.answers import AnswerReaders
from vllmx_engine.client.request import Request
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.wire.outputs import RequestMetrics, RequestOutput

from vllmx_server.config import ServerConfig
from vllmx_server.generating.answers import (
    CompletionTokens,
    PromptTokens,
    RequestTimings,
    TokenUsage,
)
from vllmx_server.http.deadline import NEVER, Deadline
from vllmx_server.watch.metrics import Metrics


class Usage:
    """Token counts of one HTTP request, over all of its prompts and choices."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens: int | None = None
        """The completion's tokens of thoughts; None where they are not separated from content."""
        self.accepted_tokens = self.rejected_tokens = 0
        """Draft tokens that were kept, and those that were not."""

    def shown(self, num_unsent: int = 0) -> TokenUsage:
        """The usage in the form of OpenAI's API, without tokens whose text the client does not
        have yet."""
        completion_tokens = self.completion_tokens - num_unsent
        return TokenUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self.prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokens(cached_tokens=self.cached_tokens),
            completion_tokens_details=self._details(),
        )

    def _details(self) -> CompletionTokens | UnsetType:
        is_drafted = self.accepted_tokens + self.rejected_tokens > 0
        if self.reasoning_tokens is None and not is_drafted:
            return UNSET
        return CompletionTokens(
            reasoning_tokens=self.reasoning_tokens or 0,
            accepted_prediction_tokens=self.accepted_tokens if is_drafted else UNSET,
            rejected_prediction_tokens=self.rejected_tokens if is_drafted else UNSET,
        )


class Generation:
    """The engine streams of one HTTP request, one for each prompt.

    Args:
        streams: already started.
        metrics: counts every token and every end.
        started_s: `time.monotonic` when the HTTP request came.
        deadline: when the streams fail.
        usage: the counts to which those of the streams are added; None: new ones.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        metrics: Metrics,
        started_s: float,
        deadline: Deadline = NEVER,
        usage: Usage | None = None,
    ) -> None:
        self._streams = streams
        self._metrics = metrics
        self._closed = False
        left_s, self._timer = deadline.left_s, None
        if left_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left_s, self._expire, deadline)
        self.usage = Usage(0) if usage is None else usage
        self.usage.prompt_tokens += sum(len(stream.prompt_token_ids) for stream in streams)
        self._watches = [_Watch(stream, metrics, self.usage, started_s) for stream in streams]

    @property
    def readers(self) -> AnswerReaders | None:
        """Readers of the answers to a conversation; None where there is nothing to tell from
        content."""
        return self._streams[0].request.readers

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        return [stream.prompt_token_ids for stream in self._streams]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output) as they come. Raises the error of the first that fails."""
        try:
            if len(self._streams) == 1:
                see = self._watches[0].see
                async for output in self._streams[0]:
                    see(output)
                    yield 0, output
                return
            async with aclosing(_merged(self._streams)) as merged:
                async for index, output in merged:
                    self._watches[index].see(output)
                    yield index, output
        except VllmxError:
            self._close("error")
            raise

    @property
    def requests(self) -> list[tuple[Request, RequestMetrics | None]]:
        """The engine's request for each prompt, and its times as far as they are known."""
        watches = zip(self._streams, self._watches, strict=True)
        return [(stream.request, watch.times) for stream, watch in watches]

    @property
    def finish_reasons(self) -> list[str]:
        """Why the choices that have ended did so."""
        return [reason for watch in self._watches for reason in watch.reasons]

    def divert(
        self,
        is_free: Callable[[], bool],
        make: Callable[[str, list[int]], bytes],
        write: Callable[[bytes], None],
    ) -> None:
        """Writes at once, from now on, what comes while `outputs` is waited for, where there is one
        prompt with one choice.

        Args:
            is_free: `write` may be called.
            make: what is to be written of new text and tokens.
        """
        if len(self._streams) == 1 and self._streams[0].request.params.n == 1:
            self._streams[0].divert(_Diverted(self._watches[0], is_free, make, write))

    async def finals(self) -> list[RequestOutput]:
        """The last output of each prompt, in their order."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            last[index] = output
        return [last[index] for index in sorted(last)]

    def close(self) -> None:
        """Aborts what has not ended. Must be called, may be called twice."""
        self._close("abort")
        self._count_unread()

    def _expire(self, deadline: Deadline) -> None:
        """Fails the streams at the deadline: readers get the error, the core's rows are free."""
        for stream in self._streams:
            stream.fail(deadline.error())

    def _count_unread(self) -> None:
        """Counts, once, answers whose calls could not be read."""
        if self.readers is not None and not self._closed:
            self._closed = True
            self._metrics.parser_fell_back("not_parsed", self.readers.num_unread)

    def _close(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for stream, watch in zip(self._streams, self._watches, strict=True):
            watch.close(reason)
            stream.abort()


class _Watch:
    """Observes the tokens and ends of one engine stream."""

    __slots__ = (
        "_counts", "_last_s", "_metrics", "_open", "_started_s", "_stream", "_usage", "has_begun",
        "reasons", "times",
    )  # fmt: skip

    def __init__(
        self, stream: RequestStream, metrics: Metrics, usage: Usage, started_s: float
    ) -> None:
        self._stream = stream
        self._metrics = metrics
        self._usage = usage
        self._started_s = started_s
        n = stream.request.params.n
        self._open = set(range(n))
        self._counts = [0] * n
        self._last_s = [0.0] * n
        self.has_begun = False
        """Some choice has a token."""
        self.times: RequestMetrics | None = None
        self.reasons: list[str] = []
        metrics.begin(n, stream.request.core[0].max_tokens)

    def see(self, output: RequestOutput) -> None:
        """Takes note of an output: what is new, or all of it."""
        assert output.metrics is not None
        self.times = output.metrics
        now_s = output.metrics.last_token_s or 0.0
        for choice in output.outputs:
            count = len(choice.token_ids)
            if count:
                self._tokens_came(choice.index, count, now_s, output)
            if choice.finish_reason is not None:
                self._end(choice.index, choice.finish_reason)
        ranked = len(self._stream.request.core) - len(self._counts)
        if output.finished and ranked:  # best_of: those that were left out cost as much
            rest = output.metrics.num_generation_tokens - sum(self._counts)
            self._usage.completion_tokens += max(0, rest)

    def more(self, count: int, now_s: float) -> None:
        """Takes note of tokens of the only choice, which has begun and goes on."""
        self._usage.completion_tokens += count
        self._counts[0] += count
        self._metrics.between_tokens.observe((now_s - self._last_s[0]) / count, count)
        self._last_s[0] = now_s

    def _tokens_came(self, index: int, count: int, now_s: float, output: RequestOutput) -> None:
        self.has_begun = True
        self._usage.completion_tokens += count
        known, before_s = self._counts[index], self._last_s[index]
        self._counts[index], self._last_s[index] = known + count, now_s
        if known:
            self._metrics.between_tokens.observe((now_s - before_s) / count, count)
            return
        assert output.metrics is not None
        first_s = output.metrics.first_token_s or now_s
        self._metrics.first_token.observe(first_s - self._started_s)
        if count > 1:
            self._metrics.between_tokens.observe((now_s - first_s) / (count - 1), count - 1)
        if not any(self._counts[:index]) and not any(self._counts[index + 1 :]):
            self._usage.cached_tokens += output.num_cached_tokens

    def _end(self, index: int, reason: str) -> None:
        self._open.discard(index)
        self.reasons.append(reason)
        count, prompt = self._counts[index], len(self._stream.prompt_token_ids)
        self._metrics.finish(reason, prompt, count, time.monotonic() - self._started_s)
        if not self._open:
            if self.times is not None:
                self._usage.accepted_tokens += self.times.num_accepted
                self._usage.rejected_tokens += self.times.num_rejected
            self._metrics.finish_request(self.times, max(self._counts))

    def close(self, reason: str) -> None:
        """Every choice that has not ended ends for `reason`."""
        for index in tuple(self._open):
            self._end(index, reason)


class _Diverted:
    """Writes the outputs of one stream to the client, instead of handing them to a reader."""

    __slots__ = ("_is_free", "_make", "_watch", "_write")

    def __init__(
        self,
        watch: _Watch,
        is_free: Callable[[], bool],
        make: Callable[[str, list[int]], bytes],
        write: Callable[[bytes], None],
    ) -> None:
        self._watch = watch
        self._is_free = is_free
        self._make = make
        self._write = write

    def is_ready(self) -> bool:
        """See `Sink.is_ready`. The first token is looked at more closely (`_Watch.see`)."""
        return self._watch.has_begun and self._is_free()

    def take(self, text: str, ids: list[int], now_s: float) -> None:
        """See `Sink.take`."""
        if ids:
            self._watch.more(len(ids), now_s)
        data = self._make(text, ids)
        if data:
            self._write(data)


async def _merged(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def phases_s(generation: Generation, index: int = 0) -> tuple[float, float]:
    """Seconds from the end of the queue to the first token of a prompt, and from there to its last
    token; zeros before they are known."""
    _, times = generation.requests[index]
    if times is None or times.first_token_s is None or times.last_token_s is None:
        return 0.0, 0.0
    scheduled_s = min(times.arrival_s + times.queue_s, times.first_token_s)
    return times.first_token_s - scheduled_s, times.last_token_s - times.first_token_s


def request_timings(config: ServerConfig, generation: Generation) -> RequestTimings | UnsetType:
    """The times of a request with one prompt and one choice; UNSET for others, as in vLLM, and
    without `--enable-per-request-metrics`."""
    if not config.enable_per_request_metrics or len(generation.requests) != 1:
        return UNSET
    ((request, times),) = generation.requests
    if len(request.core) != 1:
        return UNSET
    found = RequestTimings()
    if times is None or times.first_token_s is None or times.last_token_s is None:
        return found
    count = generation.usage.completion_tokens
    first_s, generating_s = phases_s(generation)
    found.queue_time_ms = times.queue_s * 1000
    found.time_to_first_token_ms = first_s * 1000
    found.generation_time_ms = generating_s * 1000
    if count > 1:
        found.mean_itl_ms = generating_s * 1000 / (count - 1)
    if first_s + generating_s > 0:
        found.tokens_per_second = count / (first_s + generating_s)
    return found
