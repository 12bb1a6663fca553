"""A client that leaves, reads slowly or not at all: its work ends and nobody else notices."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from vllmx_server.http.connections.connection import Connection
from vllmx_server.http.connections.timeouts import Timeouts
from vllmx_server.http.disconnect import unless_gone

from tests.waiting import PATIENCE_S, until

from .conftest import MakeServer, Served, events_of, request_bytes

LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}
CHAT = {**LONG, "messages": [{"role": "user", "content": "hello"}]}
del CHAT["prompt"]


async def _leave_after(served: Served, path: str, body: dict[str, Any], num_steps: int) -> None:
    """Leaves when the engine has made so many steps more."""
    _, writer = await served.connect()
    wanted = served.llm.stats.num_steps + num_steps
    writer.write(request_bytes(path, body))
    await writer.drain()
    await until(lambda: served.llm.stats.num_steps >= wanted)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "stream": True}),
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": True}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 2}),
        ("/v1/chat/completions", {**CHAT, "n": 3, "stream": True}),
        ("/v1/chat/completions", CHAT),
    ],
)
@pytest.mark.parametrize("num_steps", [0, 20])
async def test_a_client_that_leaves_frees_everything(
    make_server: MakeServer, path: str, body: dict[str, Any], num_steps: int
) -> None:
    async with make_server(step_s=0.01, max_model_len=10_000) as served:
        await served.complete(max_tokens=1)
        await _leave_after(served, path, body | {"max_tokens": 9000}, num_steps)
        await served.becomes_idle()
        steps = served.llm.stats.num_steps
        assert steps < 9000, "the generation went on after the client had left"
        await served.complete(max_tokens=2)
        text = (await served.client.get("/metrics")).text
        assert 'request_success_total{finished_reason="length",model_name="fake"} 2.0' in text


async def test_aborted_choices_are_counted(make_server: MakeServer) -> None:
    async with make_server(step_s=0.01) as served:
        await _leave_after(served, "/v1/chat/completions", {**CHAT, "n": 3, "stream": True}, 5)
        await served.becomes_idle()
        text = (await served.client.get("/metrics")).text
        assert 'request_success_total{finished_reason="abort",model_name="fake"} 3.0' in text


async def test_a_client_that_waits_in_the_queue_can_leave(make_server: MakeServer) -> None:
    async with make_server(engine={"max_num_seqs": 1}, step_s=0.01) as served:
        running = asyncio.ensure_future(served.complete(max_tokens=200))
        await served.in_flight_become(1)
        _, writer = await served.connect()
        writer.write(request_bytes("/v1/completions", {**LONG, "stream": True}))
        await served.in_flight_become(2)
        writer.transport.abort()
        await served.in_flight_become(1)
        assert not running.done()
        await running
        await served.becomes_idle()


TALK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", TALK),
        ("/v1/messages", {**TALK, "max_tokens": 5}),
        ("/v1/messages/count_tokens", TALK),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", TALK),
    ],
)
async def test_rendering_stops_when_its_client_leaves(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    begun, stopped_by_client = threading.Event(), threading.Event()

    def render(messages: object, chat: object, stopped: Callable[[], bool]) -> str:
        begun.set()
        while not stopped():
            time.sleep(0.002)
        stopped_by_client.set()
        return "late"

    monkeypatch.setattr(served.llm, "render_chat", render)
    _, writer = await served.connect()
    writer.write(request_bytes(path, body))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    writer.transport.abort()
    assert await asyncio.to_thread(stopped_by_client.wait, PATIENCE_S)
    await served.becomes_idle()


async def test_a_client_that_leaves_while_sending_its_body(served: Served) -> None:
    _, writer = await served.connect()
    writer.write(request_bytes("/v1/completions", LONG)[:-10])
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()
    await served.complete(max_tokens=1)
    await served.becomes_idle()


async def test_a_client_that_reads_nothing_holds_up_nobody(make_server: MakeServer) -> None:
    """The answer ends in the engine at full speed; what the client has not read is merged, not
    queued."""
    async with make_server(max_model_len=10_000, verify_pages=False, send_bytes=8192) as served:
        reader, writer = await served.connect(receive_bytes=4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = {**LONG, "max_tokens": 1000, "stream": True, "logprobs": 20}
        writer.write(request_bytes("/v1/completions", {**body, "return_token_ids": True}))
        await served.in_flight_become(1)
        await asyncio.gather(*(served.complete(max_tokens=20) for _ in range(8)))
        await until(lambda: not served.llm.num_in_flight)
        assert served.state.admission.in_flight == 1, "the answer was small enough to be sent"
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        events = events_of((await reader.readuntil(b"[DONE]\n\n")).decode())
        tokens = [event["choices"][0]["token_ids"] for event in events[:-1]]
        assert sum(map(len, tokens)) == 1000
        assert max(map(len, tokens)) > 50
        await served.becomes_idle()


async def test_a_client_that_takes_nothing_counts_as_gone(make_server: MakeServer) -> None:
    server = {"send_timeout_s": 0.2}
    async with make_server(server, max_model_len=10_000, send_bytes=8192) as served:
        _, writer = await served.connect(receive_bytes=4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = {"prompt": "a" * 9000, "echo": True, "n": 64, "max_tokens": 1, "stream": True}
        writer.write(request_bytes("/v1/completions", body))
        await served.in_flight_become(1)
        await served.becomes_idle()
        writer.transport.abort()


class Dripping:
    """A transport whose client takes `step` bytes at a time of what waits."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.left = 2000
        self.aborted = False

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        self.left = max(0, self.left - self.step)
        return self.left

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("step", "is_cut"), [(1, True), (100, False)])
async def test_a_client_that_takes_a_byte_now_and_then_is_cut(step: int, is_cut: bool) -> None:
    """A byte in each 0.05 s is not enough; 12 would be."""
    transport = Dripping(step)

    async def drain() -> None:
        await asyncio.Event().wait()

    shared = Mock(timeouts=Timeouts(1.0, 0.05))
    connection = Connection(shared, lambda idle: None)
    connection.writer = Mock(transport=transport, drain=drain)
    with pytest.raises(ConnectionAbortedError) if is_cut else nullcontext():
        await connection._write(b"abc")
    assert transport.aborted == is_cut
    assert bool(transport.left) == is_cut


async def test_a_slow_answer_is_no_slow_client(make_server: MakeServer) -> None:
    async with make_server({"send_timeout_s": 0.05}, step_s=0.15) as served:
        assert (await served.complete(max_tokens=4))["usage"]["completion_tokens"] == 4
        events = await served.events("/v1/completions", prompt="a", max_tokens=4)
        assert events[-1] == "[DONE]"


async def test_keep_alive_and_requests_one_after_another(served: Served) -> None:
    reader, writer = await served.connect()
    for stream in (False, True, False):
        body = {"prompt": "ab", "max_tokens": 3, "stream": stream}
        writer.write(request_bytes("/v1/completions", body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        if b"content-length: " in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
        else:
            await reader.readuntil(b"0\r\n\r\n")
    writer.close()


async def test_requests_sent_without_waiting_are_answered_in_order(served: Served) -> None:
    reader, writer = await served.connect()
    for n in (1, 2):
        writer.write(request_bytes("/v1/completions", {"prompt": "ab", "max_tokens": n}))
    for n in (1, 2):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.split(b"content-length: ")[1].split(b"\r")[0])
        assert b'"completion_tokens":%d' % n in await reader.readexactly(size)
    writer.close()


async def test_64_at_once_equal_one_at_a_time(served: Served) -> None:
    async def one(index: int) -> list[str]:
        stream = {"prompt": f"number {index}", "max_tokens": 20, "temperature": index % 2}
        events = await served.events("/v1/completions", seed=index, **stream)
        return [event["choices"][0]["text"] for event in events[:-1]]

    alone = ["".join(await one(index)) for index in range(64)]
    together = await asyncio.gather(*(one(index) for index in range(64)))
    assert ["".join(pieces) for pieces in together] == alone
    await served.becomes_idle()


@pytest.mark.parametrize("num_turns", range(1, 10))
async def test_what_is_started_for_nobody_is_aborted(num_turns: int) -> None:
    """However far the submission is when its request is cancelled."""
    started, aborted = [], []

    class Stream:
        def abort(self) -> None:
            aborted.append(self)

    async def submit() -> list[Any]:
        await asyncio.sleep(0)
        started.append(Stream())
        return started

    async def receive() -> Any:
        await asyncio.Event().wait()

    asking = asyncio.ensure_future(unless_gone(receive, submit()))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait((asking,))
    await asyncio.sleep(0.01)
    assert set(aborted) == (set(started) if asking.cancelled() else set())
    assert num_turns < 9 or not asking.cancelled(), "the last ones come too late"
