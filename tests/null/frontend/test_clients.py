"""Several processes as clients of one core."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, RankLostError, VllmxError
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.core.core_loop import Inbox
from vllmx_engine.core.found_model import FoundModel, find_model
from vllmx_engine.core_start import CoreStart
from vllmx_engine.link.attached_frontend import AttachedFrontend
from vllmx_engine.link.core_socket import ClientListener, CoreSocket
from vllmx_engine.link.frontend import Frontend, Listener, cause_of
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.supervisor import CoreListener
from vllmx_engine.wire import outbox
from vllmx_engine.wire.ipc import (
    AbortRequests,
    Called,
    FrameReader,
    FromCore,
    Outputs,
    Stats,
    from_core_decoder,
)
from vllmx_engine.wire.messages import CoreInfo, CoreOutput, CoreStats, TokenLogprobs
from vllmx_engine.wire.outbox import Updates

from tests.waiting import PATIENCE_S, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


class Shared:
    """A core in a process of its own, and its door."""

    def __init__(self, found: FoundModel, owner: ProcessFrontend, door: CoreListener) -> None:
        self.found, self.owner, self.door = found, owner, door

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncLLM]:
        starting: asyncio.Future[Frontend] = asyncio.ensure_future(
            AttachedFrontend.start(self.door.path)
        )
        async with CoreStart(self.found, starting) as start, await AsyncLLM.over(start) as llm:
            yield llm


@pytest.fixture
async def shared(slow_folder: str, registry: Registry) -> AsyncIterator[Shared]:
    async with sharing(slow_folder, registry) as found:
        yield found


@asynccontextmanager
async def sharing(folder: str, registry: Registry) -> AsyncIterator[Shared]:
    found = find_model(EngineConfig(model=folder, backend="fake"), registry)
    door = CoreListener()
    owner = await ProcessFrontend.start(found, door)
    try:
        yield Shared(found, owner, door)
    finally:
        door.close()
        await owner.close()


async def until_running(llm: AsyncLLM, count: int) -> None:
    """Waits until the core says that so many sequences run."""
    await until(lambda: llm.stats.num_running == count)


async def test_clients_get_the_answers_to_their_own_requests(shared: Shared) -> None:
    assert shared.door.path.stat().st_mode & 0o777 == 0o600
    async with shared.client() as one, shared.client() as two:
        assert {one.info.id_prefix, two.info.id_prefix} == {"1:", "2:"}
        same = "req-of-both"  # and both count their requests from 0
        streams = [
            await llm.submit("hi", GREEDY, request_id=same, kind="final") for llm in (one, two)
        ]
        answers = [(await stream.last()).outputs[0].token_ids for stream in streams]
        assert answers[0] == answers[1]
        assert len(answers[0]) == 20


async def test_a_client_that_leaves_ends_its_requests_alone(shared: Shared) -> None:
    async with shared.client() as stays:
        mine = await stays.submit("mine", LONG)
        assert stays.info.id_prefix == "1:"
        async with shared.client() as leaves:
            await leaves.submit("theirs", LONG)
            await until_running(stays, 2)
            leaves._frontend.abort(["1:0.0"])  # the other's: nothing happens
        await until_running(stays, 1)
        await anext(mine)
        mine.abort()
        await until_running(stays, 0)


async def test_a_dead_core_is_told_to_all_and_found_again(shared: Shared) -> None:
    async with shared.client() as one, shared.client() as two:
        streams = [await llm.submit("hi", LONG) for llm in (one, two)]
        for stream in streams:
            await anext(stream)
        os.kill(shared.owner.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="being restarted"):
                await stream.last()
        for llm in (one, two):
            await until(lambda llm=llm: llm.is_ready)  # type: ignore[misc]
            answer = await (await llm.submit("hi", GREEDY)).last()
            assert answer.finished


async def test_a_core_that_gives_up_says_why_to_all(
    make_folder: Callable[..., str], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does to the process that started it."""
    monkeypatch.setattr(ProcessFrontend, "FIRST_DELAY_S", 10.0)
    folder = make_folder("failing", fail_steps=[0, 1, 2], step_s=0.01)
    cause = "the backend failed 3 steps in a row: restart the engine; the log has the details"
    async with sharing(folder, registry) as shared, shared.client() as one, shared.client() as two:
        error = VllmxError("")
        while not isinstance(error, EngineDeadError):
            with pytest.raises(VllmxError) as raised:
                await (await one.submit("hi", GREEDY)).last()
            error = raised.value
        assert cause in error.message
        await until(lambda: not two.is_ready)
        with pytest.raises(EngineDeadError, match=re.escape(f"being restarted ({cause}): try")):
            await two.submit("hi", GREEDY)


async def test_what_the_supervisor_says_of_a_core_that_it_ended(shared: Shared) -> None:
    """Its own requests are told what to do besides, which is not told twice."""
    cause = RankLostError("rank 0 (process 7) hangs or was stopped")
    async with shared.client() as llm:
        shared.owner.listener = Listener(
            outputs=lambda outputs: None,
            stats=lambda stats: None,
            lost=lambda error: llm.note(cause_of(error)),
            restarted=lambda info: None,
            dead=lambda: None,
        )
        stream = await llm.submit("hi", LONG)
        await anext(stream)
        shared.owner._core.end(cause)
        with pytest.raises(RankLostError) as raised:
            await stream.last()
        again = "the engine core is being restarted: send the request again"
        assert raised.value.message == f"{cause.message}; {again}"
        await until(lambda: llm.is_ready)


async def test_a_core_whose_door_is_gone_is_dead(shared: Shared) -> None:
    async with shared.client() as llm:
        shared.door.close()
        await shared.owner.close()
        error = await llm.until_dead()
        assert "ended by its supervisor" in error.message
        assert llm.errored


async def test_garbage_of_one_client_is_no_harm_to_others(shared: Shared) -> None:
    async with shared.client() as llm:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(shared.door.path))
            stranger.sendall(b"\x02\0\0\0\xc1\xc1")
            stranger.settimeout(PATIENCE_S)
            while await asyncio.to_thread(stranger.recv, 1 << 16):
                pass  # until the core has closed it
        assert (await (await llm.submit("hi", GREEDY)).last()).finished


def test_what_a_client_does_not_read_is_merged() -> None:
    waiting = Updates()
    logprob = TokenLogprobs(1, -0.5, 1, [1], [-0.5])
    piece = CoreOutput(request_id="a", ids=[], prompt_logprobs=[logprob])
    first = CoreOutput(request_id="a", ids=[1], num_cached_tokens=3, queue_s=0.1)
    last = CoreOutput(request_id="a", ids=[2, 3], finish_reason="length", logprobs=[logprob])
    other = CoreOutput(request_id="b", ids=[9])
    assert not waiting
    for message in (
        Stats(CoreStats(num_running=1)),
        Outputs([piece]),
        Outputs([first, other]),
        Called(1, True),
        Stats(CoreStats(num_running=2)),
        Outputs([last]),
    ):
        assert waiting.add(message)
    merged = CoreOutput(
        request_id="a",
        ids=[1, 2, 3],
        finish_reason="length",
        logprobs=[logprob],
        num_cached_tokens=3,
        queue_s=0.1,
    )
    assert waiting.take() == [
        Outputs([piece]),
        Called(1, True),
        Outputs([merged, other]),
        Stats(CoreStats(num_running=2)),
    ]
    assert not waiting
    assert first.ids == [1], "what is merged belongs to somebody else"


def test_a_client_that_reads_again_finds_one_update_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ours, theirs:
        core = CoreSocket(ours, lambda: None)
        assert core.send(Outputs([CoreOutput(request_id="long", ids=[1 << 20] * 100_000)]))
        for number in range(1000):
            assert core.send(Outputs([CoreOutput(request_id="a", ids=[number])]))
        monkeypatch.setattr(outbox, "MAX_MERGED_BYTES", 1000)
        assert not core.send(Outputs([CoreOutput(request_id="a", ids=[1000])]))
        reader: FrameReader[FromCore] = FrameReader(from_core_decoder)
        messages: list[FromCore] = []
        theirs.settimeout(PATIENCE_S)
        while len(messages) < 2:
            messages += reader.feed(theirs.recv(1 << 16))
        assert messages[1] == Outputs([CoreOutput(request_id="a", ids=list(range(1001)))])
        assert core.send(Outputs([CoreOutput(request_id="a", ids=[7])])), "it is sent at once"


def test_only_ids_of_their_own_can_be_aborted() -> None:
    from vllmx_engine.core.core_loop import Client

    owner, other = Client("", lambda message: True), Client("2:", lambda message: True)
    ids = AbortRequests(["0.0", "2:0.0", "22:0.0", "pool-1"]).request_ids
    assert [one for one in ids if owner.owns(one)] == ["0.0", "pool-1"]
    assert [one for one in ids if other.owns(one)] == ["2:0.0"]


def test_a_core_that_ends_lets_nobody_in(tmp_path: Path, info: CoreInfo) -> None:
    """A client that has lost it comes again at once, and must find the next core."""
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        inbox: Inbox = SimpleQueue()
        door = ClientListener(listener, inbox)
        door.open(info)
        with socket.socket(socket.AF_UNIX) as early, socket.socket(socket.AF_UNIX) as late:
            early.connect(str(path))
            assert early.recv(1)
            assert len(door.close()) == 1
            late.connect(str(path))
            late.settimeout(PATIENCE_S)
            assert late.recv(1) == b""
