"""The arithmetic of `vllmx bench`, and its HTTP client against a scripted server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from vllmx.bench.figures import percentile, show
from vllmx.bench.sse_client import stream_completion


def test_percentile_is_numpys() -> None:
    values = [random.random() for _ in range(37)]
    for share in (0.0, 0.25, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.quantile(values, share))
    assert np.isnan(percentile([], 0.5))


def test_show_prints_a_table_or_json() -> None:
    records = [{"n": 1, "tokens_per_s": 12.345}, {"n": 16, "tokens_per_s": 100.0}]
    assert json.loads(show(records, True)) == records
    assert show(records, False).splitlines() == [
        " n  tokens_per_s",
        " 1         12.35",
        "16        100.00",
    ]


def test_a_figure_that_a_record_lacks_is_a_dash() -> None:
    records: list[dict[str, float | int | str]] = [{"n": 1}, {"n": 2, "peer": 0.5}]
    assert show(records, False).splitlines() == ["n  peer", "1     -", "2  0.50"]


@asynccontextmanager
async def serving(answer: bytes) -> AsyncIterator[str]:
    """A server that answers every request with the same bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_client_counts_events_and_tokens() -> None:
    events = [
        b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n',
        b'data: {"choices":[{"text":"a"}]}\n\n',
        b'data: {"choices":[{"text":"b"}]}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n',
        b"data: [DONE]\n\n",
    ]
    async with serving(b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(events)) as url:
        result = await stream_completion(url, "/v1/completions", {"prompt": "x"})
    assert result.error is None
    assert (len(result.event_s), result.completion_tokens) == (2, 2)
    assert len(result.gaps_s) == 1


async def test_a_refusal_is_an_error_in_the_result() -> None:
    async with serving(b'HTTP/1.1 429 Too Many\r\n\r\n{"error": {"message": "full"}}') as url:
        result = await stream_completion(url, "/v1/completions", {"prompt": "x"})
    assert result.error is not None
    assert "full" in result.error
