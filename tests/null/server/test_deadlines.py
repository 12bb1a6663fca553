"""Requests that take, or wait, longer than the server lets them. The model is so slow that no
answer of it can come first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from vllmx_core.sampling import SamplingParams
from vllmx_server.apis.batches.runner import KeptFiles
from vllmx_server.http.deadline import Deadline

from tests.waiting import until

from .conftest import MakeServer, Served, request_bytes

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/messages", {**CHAT, "max_tokens": 50}),
    ("/v1/responses", {"input": "hi"}),
]


@asynccontextmanager
async def busy(make_server: MakeServer, **server: float) -> AsyncIterator[Served]:
    """A server whose only row is taken for twenty seconds."""
    async with make_server(server, {"max_num_seqs": 1}, step_s=0.05) as served:
        async with await served.llm.submit("a", SamplingParams(max_tokens=400, ignore_eos=True)):
            await until(lambda: served.llm.stats.num_running > 0)
            yield served
        await served.becomes_idle()


async def test_a_request_that_takes_too_long_is_504(make_server: MakeServer) -> None:
    async with busy(make_server, request_timeout_s=0.05) as served:
        for path, body in ASKED:
            for stream in (False, True):  # no token comes before, so both have their status
                response = await served.post(path, stream=stream, **body)
                assert response.status_code == 504, response.text
                error = response.json()["error"]
                assert error["type"] == "timeout_error"
                assert "0.05 s" in error["message"]
                assert "--request-timeout-s" in error["message"]


async def test_a_stream_that_takes_too_long_ends_with_an_event(make_server: MakeServer) -> None:
    server = {"request_timeout_s": 3600.0, "sse_ping_interval_s": 0.01}
    async with make_server(server, step_s=0.05) as served:
        reader, writer = await served.connect()
        body = {"prompt": "a", "stream": True, "max_tokens": 400}
        writer.write(request_bytes("/v1/completions", body))
        await reader.readuntil(b"data: ")
        for stream in list(served.llm._streams):  # as the timer does
            stream.fail(Deadline(0.5).error())
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        assert b'"code":"request_timeout"' in rest
        await served.becomes_idle()


async def test_a_deadline_counts_the_work_before_the_core(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_server({"request_timeout_s": 0.1}) as served:
        ended = asyncio.Event()

        async def for_ever(*_: Any, **__: Any) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        monkeypatch.setattr(served.llm.text, "run", for_ever)
        response = await served.post("/v1/chat/completions", **CHAT)
        assert response.status_code == 504
        assert ended.is_set()
        assert served.state.admission.in_flight == 0


async def test_a_request_that_waits_too_long_is_503_with_retry_after(
    make_server: MakeServer,
) -> None:
    async with busy(make_server, queue_timeout_s=0.01) as served:
        for path, body in ASKED:
            for stream in (False, True):
                response = await served.post(path, stream=stream, **body)
                assert response.status_code == 503, response.text
                assert "--queue-timeout-s" in response.json()["error"]["message"]
                assert int(response.headers["retry-after"]) >= 1


async def test_batches_have_no_deadlines(make_server: MakeServer) -> None:
    server = {"queue_timeout_s": 0.001, "request_timeout_s": 0.001}
    async with make_server(server, step_s=0.01) as served:
        body = b'{"model": "fake", "prompt": "a", "max_tokens": 3, "ignore_eos": true}'
        answerer = served.state.store(KeptFiles).runner._lines._answerer
        answer = await answerer.answer("/v1/completions", body, "")
        assert answer.status == 200, answer.body
