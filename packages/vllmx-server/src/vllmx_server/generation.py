"""Driving engine streams for a request: outputs of several prompts as one, with their metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

from vllmx_engine.request_stream import RequestStream
from vllmx_engine.outputs import RequestOutput

from vllmx_server.metrics import Metrics


class Usage:
    """Token counts of one HTTP request, over all of its prompts and choices."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self.completion_tokens = 0
        self.cached_tokens = 0

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Watch:
    """Observes the latencies of one engine stream."""

    __slots__ = ("_generated", "_last", "_metrics", "_prompt", "_start", "_usage")

    def __init__(self, metrics: Metrics, usage: Usage, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._usage = usage
        self._prompt = prompt_tokens
        self._start = time.perf_counter()
        self._last = 0.0
        self._generated: dict[int, int] = {}

    def see(self, output: RequestOutput) -> None:
        """Takes note of a delta."""
        now = time.perf_counter()
        new = 0
        for choice in output.outputs:
            count = len(choice.token_ids)
            new += count
            total = self._generated[choice.index] = self._generated.get(choice.index, 0) + count
            if choice.finish_reason is not None:
                elapsed = now - self._start
                self._metrics.finish(choice.finish_reason, self._prompt, total, elapsed)
        if new:
            if self._last:
                self._metrics.between_tokens.observe(now - self._last)
            else:
                self._metrics.first_token.observe(now - self._start)
                self._usage.cached_tokens += output.num_cached_tokens
            self._last = now
            self._usage.completion_tokens += new


async def outputs_of(
    streams: Sequence[RequestStream], metrics: Metrics, usage: Usage
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the prompt, delta) as they come. Leaving it early aborts every stream."""
    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        watches = [Watch(metrics, usage, len(stream.prompt_token_ids)) for stream in streams]
        if len(streams) == 1:
            async for output in streams[0]:
                watches[0].see(output)
                yield 0, output
            return
        async for index, output in _merged(streams):
            watches[index].see(output)
            yield index, output


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
