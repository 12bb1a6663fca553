"""Open-loop and closed-loop load on a running HTTP server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from vllmx_core.records import Record

from vllmx.bench.figures import spread
from vllmx.bench.sse_client import Streamed, stream_completion


class Load(Record):
    """The requests of a measurement, and the server's address."""

    url: str
    model: str
    vocab_size: int
    input_len: int
    output_len: int
    num_requests: int
    api_key: str | None = None
    seed: int = 0


async def closed_loop(load: Load, concurrency: int) -> dict[str, float | int]:
    """`concurrency` clients, each sending its next request when the last one has ended."""
    started = time.perf_counter()
    results = await closed_loop_results(load, concurrency)
    return {"n": concurrency, **_figures(results, time.perf_counter() - started)}


async def closed_loop_results(load: Load, concurrency: int) -> list[Streamed]:
    """Returns the results of the requests of `closed_loop`."""
    numbers = iter(range(load.num_requests))
    results: list[Streamed] = []

    async def client() -> None:
        for number in numbers:
            results.append(await _one(load, number))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return results


async def open_loop(load: Load, requests_per_s: float) -> dict[str, float | int]:
    """Requests arrive by a Poisson process, whatever the server does."""
    started = time.perf_counter()
    results = await arrivals(load, requests_per_s)
    return {"rate": requests_per_s, **_figures(results, time.perf_counter() - started)}


async def arrivals(
    load: Load, requests_per_s: float, patience_s: float | None = None
) -> list[Streamed]:
    """The requests of a Poisson process. A request without an answer `patience_s` after the last
    arrival is an error."""
    source = random.Random(load.seed)  # noqa: S311 - test data
    tasks = []
    due = time.perf_counter()
    for number in range(load.num_requests):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(_one(load, number)))
        due += source.expovariate(requests_per_s)
    _, late = await asyncio.wait(tasks, timeout=patience_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    unanswered = Streamed(due, error=f"no answer within {patience_s} s")
    return [unanswered if task in late else task.result() for task in tasks]


async def _one(load: Load, number: int) -> Streamed:
    source = random.Random(load.seed * 1_000_003 + number)  # noqa: S311 - test data
    body = {
        "model": load.model,
        "prompt": [source.randrange(load.vocab_size) for _ in range(load.input_len)],
        "max_tokens": load.output_len,
        "ignore_eos": True,
        "temperature": 0,
    }
    return await stream_completion(load.url, "/v1/completions", body, load.api_key)


def _figures(results: Sequence[Streamed], elapsed_s: float) -> dict[str, float | int]:
    good = [result for result in results if result.error is None and result.event_s]
    tokens = sum(result.completion_tokens for result in good)
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "seconds": round(elapsed_s, 2),
        "output_tokens_per_s": round(tokens / elapsed_s, 2),
        **spread("first_token", [result.first_token_s for result in good]),
        **spread("between_events", [gap for result in good for gap in result.gaps_s]),
    }
