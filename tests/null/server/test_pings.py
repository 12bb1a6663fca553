"""Comments in a stream that waits, sent by a timer beside the stream's own task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

import pytest
from starlette.types import Message
from vllmx_core.errors import EngineDeadError
from vllmx_server.generating.generation import Generation
from vllmx_server.http.event_stream import DONE, EventStream
from vllmx_server.http.pings import PING, Pings

from tests.waiting import PATIENCE_S, until

from .conftest import MakeServer, events_of, request_bytes

QUICK_S = 0.002


class NoGeneration:
    def close(self) -> None:
        pass


class Wire:
    """What a stream has sent; `blocked` keeps its client from taking anything."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.free = asyncio.Event()
        self.free.set()

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        await self.free.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def becomes(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    def stream(
        self, events: AsyncGenerator[bytes, None], interval_s: float = QUICK_S
    ) -> Awaitable[None]:
        """Runs the response."""
        held = EventStream(cast(Generation, NoGeneration()), lambda: None, 60.0, events, interval_s)
        scope: dict[str, Any] = {"type": "http", "state": {"send": self.send, "request_id": "r"}}
        return asyncio.ensure_future(held(scope, asyncio.Event().wait, self.send))  # type: ignore[arg-type]


async def events_after(gate: asyncio.Event, *events: bytes) -> AsyncGenerator[bytes, None]:
    await gate.wait()
    for event in events:
        yield event


async def test_a_stream_that_waits_says_so_before_its_first_event() -> None:
    wire, gate = Wire(), asyncio.Event()
    running = wire.stream(events_after(gate, b"data: 1\n\n", DONE))
    await wire.becomes(lambda: wire.body.count(PING) >= 3)
    gate.set()
    await running
    assert [message["type"] for message in wire.messages[:2]] == [
        "http.response.start",
        "http.response.body",
    ]
    assert sum(message["type"] == "http.response.start" for message in wire.messages) == 1
    assert wire.body.replace(PING, b"") == b"data: 1\n\n" + DONE
    assert [message["more_body"] for message in wire.messages[-2:]] == [True, False]


async def test_what_fails_after_a_comment_is_an_event_and_before_it_a_status() -> None:
    async def failing(gate: asyncio.Event) -> AsyncGenerator[bytes, None]:
        await gate.wait()
        raise EngineDeadError("gone")
        yield b""

    wire, gate = Wire(), asyncio.Event()
    running = wire.stream(failing(gate))
    await wire.becomes(lambda: PING in wire.body)
    gate.set()
    await running
    assert b'"message":"gone"' in wire.body
    assert wire.body.endswith(DONE)
    wire = Wire()
    with pytest.raises(EngineDeadError):
        await wire.stream(failing(gate), interval_s=60.0)
    assert wire.messages == []


async def test_a_comment_never_gets_into_an_event() -> None:
    wire, gate = Wire(), asyncio.Event()
    wire.free.clear()
    running = wire.stream(events_after(gate, b"data: 1\n\n"))
    await wire.becomes(lambda: len(wire.messages) == 1)
    gate.set()
    for _ in range(20):  # the event is there, and the status of the comment not taken yet
        await asyncio.sleep(0)
    assert [message["type"] for message in wire.messages] == ["http.response.start"]
    wire.free.set()
    await running
    assert wire.body.startswith(PING)
    assert wire.body.replace(PING, b"") == b"data: 1\n\n"


async def test_only_silence_is_broken() -> None:
    sent, pinged = 0, asyncio.Event()
    pings = Pings(QUICK_S, lambda: sent, pinged.set)
    pings.start()
    for _ in range(20):
        sent += 1
        pings._look()
        assert not pinged.is_set()
    pings._look()
    assert pinged.is_set()
    pings.stop()
    never = Pings(0.0, lambda: sent, pinged.set)
    never.start()
    assert never._timer is None


async def test_comments_over_http(make_server: MakeServer, held_steps: threading.Event) -> None:
    """The first token takes its time."""
    server = {"sse_ping_interval_s": 0.02}
    async with make_server(server, step_s=3600.0) as served:
        reader, writer = await served.connect()
        body = {"prompt": "ab", "max_tokens": 3, "stream": True, "return_token_ids": True}
        writer.write(request_bytes("/v1/completions", body))
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(PING)
            held_steps.set()
            text = (await reader.readuntil(b"0\r\n\r\n")).decode()
        assert head.startswith(b"HTTP/1.1 200")
        assert b"data:" not in head
        events = events_of(text)
        assert events[-1] == "[DONE]"
        assert sum(len(event["choices"][0]["token_ids"]) for event in events[:-1]) == 3


async def test_a_ping_is_no_silence() -> None:
    """One in each interval, which has two looks."""
    sent = 0

    def ping() -> None:
        nonlocal sent
        sent += 1

    pings = Pings(1e6, lambda: sent, ping)
    pings.start()
    looks = []
    for _ in range(6):
        pings._look()
        looks.append(sent)
    pings.stop()
    assert looks == [1, 1, 2, 2, 3, 3]
