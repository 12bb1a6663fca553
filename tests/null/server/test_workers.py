"""What the processes of one server say to each other and count together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import chain
from unittest.mock import Mock

import msgspec
import pytest
from vllmx_core.errors import EngineDeadError, InvalidRequestError, QueueFullError
from vllmx_engine.wire.ipc import ErrorRecord
from vllmx_engine.wire.messages import CoreStats
from vllmx_server.errors import OverloadedError
from vllmx_server.host import worker as worker_module
from vllmx_server.host.server import Server
from vllmx_server.host.workers.channel import Channel, GoneError
from vllmx_server.host.workers.dispatch import Dispatcher, Mailbox
from vllmx_server.host.workers.messages import Reload
from vllmx_server.host.workers.peers import RemoteLimiter, RemoteUsage
from vllmx_server.host.workers.pool import Worker, WorkerPool, asked_of_all
from vllmx_server.host.workers.shared_counts import SharedCounts
from vllmx_server.host.workers.supervisor import Counted, ModelCounts, WorkerLimiter
from vllmx_server.limits.rate_limiter import Granted, Reservation, Unlimited, Used
from vllmx_server.limits.usage import KeyUsage, UsageLedger
from vllmx_server.watch.metrics import MetricCounts, Metrics

from tests.waiting import until


@asynccontextmanager
async def channels() -> AsyncIterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    one, two = await Channel.over(ours), await Channel.over(theirs)
    try:
        yield one, two
    finally:
        one.close()
        two.close()
        await asyncio.gather(one.gone.wait(), two.gone.wait())


async def test_both_sides_ask_and_answers_find_who_asked() -> None:
    async with channels() as (one, two):
        second = asyncio.Event()

        async def slow_first(number: int) -> int:
            if number == 1:
                await second.wait()
            second.set()
            return number * 10

        two.serve(times_ten=slow_first)
        one.serve(name=lambda: "one")
        answers = await asyncio.gather(*(one.ask("times_ten", n, int) for n in (1, 2)))
        assert answers == [10, 20]
        assert await two.ask("name", None, str) == "one"


async def test_a_worker_that_ends_as_it_is_to_lead_is_passed_over() -> None:
    """Two that are killed at once: one's end is noticed while the other still counts as alive."""
    async with channels() as (gone, end), channels() as (alive, other):
        asked: list[bool] = []

        async def lead(body: bool) -> None:
            asked.append(body)

        other.serve(lead=lead)
        pool = WorkerPool.__new__(WorkerPool)  # without processes
        pool._leader, pool._had_leader = None, True
        pool._workers = {row: worker_over(each) for row, each in enumerate((gone, alive))}
        end.close()
        await gone.gone.wait()
        await pool._choose_leader()
        assert pool.leader is alive
        assert asked == [False]


async def test_a_process_that_is_being_started_has_nothing_to_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that takes the place of a dead one is asked before it serves."""
    async with channels() as (supervisor, other):
        with socket.socket() as listener:
            starting = worker_module.Worker(other, listener, None, -1)
            assert await supervisor.ask("count", None, ModelCounts) == {}
            supervisor.tell("reload", Reload(keys=True, certificate=False))
            supervisor.tell("core_lost", ErrorRecord.of(EngineDeadError("gone")))
            assert await supervisor.ask("leave", "one", bool)
            await supervisor.ask("end", None, type(None))
            state = Mock(spec=Server)
            starting.begin_serving(state)
            state.reload.assert_called_once_with(keys=True, certificate=False, level=logging.DEBUG)
    assert not caplog.messages


def worker_over(channel: Channel) -> Worker:
    worker = Worker(subprocess.Popen(["true"]), channel)
    worker.process.wait()
    worker.serves = True
    return worker


async def test_errors_of_ours_come_back_whole_and_others_tell_nothing() -> None:
    async with channels() as (one, two):
        errors = [
            InvalidRequestError("no", param="x"),
            QueueFullError("full", retry_after_s=7.0),
            OverloadedError("busy"),
            ZeroDivisionError("secret"),
        ]

        async def fail(index: int) -> None:
            raise errors[index]

        two.serve(fail=fail)
        with pytest.raises(InvalidRequestError, match="no") as refused:
            await one.ask("fail", 0, int)
        assert refused.value.param == "x"
        with pytest.raises(QueueFullError) as full:
            await one.ask("fail", 1, int)
        assert full.value.retry_after_s == 7.0
        with pytest.raises(OverloadedError) as busy:
            await one.ask("fail", 2, int)
        assert (busy.value.code, busy.value.http_status) == ("overloaded", 503)
        with pytest.raises(Exception, match="internal error") as hidden:
            await one.ask("fail", 3, int)
        assert "secret" not in str(hidden.value)
        with pytest.raises(Exception, match="internal error"):
            await one.ask("unknown", 0, int)


async def test_whoever_waits_for_a_process_that_ends_is_told() -> None:
    async with channels() as (one, two):
        asked = asyncio.Event()

        async def never() -> None:
            asked.set()
            await asyncio.get_running_loop().create_future()

        two.serve(never=never)
        waiting = asyncio.ensure_future(one.ask("never", None, int))
        await asked.wait()
        two.close()
        with pytest.raises(GoneError):
            await waiting
        with pytest.raises(EngineDeadError):
            await one.ask("never", None, int)
        one.tell("never", None)  # which nobody hears


async def test_only_answers_in_time_are_gathered() -> None:
    async with channels() as (one, two), channels() as (three, four):
        two.serve(count=lambda: asyncio.sleep(0, 5))
        four.serve(count=asyncio.get_running_loop().create_future)
        assert await asked_of_all([one, three], "count", int, 1.0) == [5]
        assert await asked_of_all([], "count", int, 0.05) == []


class CountingLimiter(Unlimited):
    """Remembers what was settled."""

    def __init__(self) -> None:
        super().__init__()
        self.settled: list[Used] = []

    async def reserve(self, wanted: Reservation) -> Granted:
        if wanted.num_tokens > 100:
            raise QueueFullError("too many tokens", retry_after_s=3.0)
        return await super().reserve(wanted)

    async def settle(self, used: Used) -> None:
        self.settled.append(used)


async def test_a_desk_serves_other_processes_and_settles_for_those_that_die() -> None:
    limiter = CountingLimiter()
    async with channels() as (supervisor, worker):
        served, remote = WorkerLimiter(limiter, supervisor), RemoteLimiter(worker)
        first = await remote.reserve(Reservation(key="a", model="m", num_tokens=50))
        second = await remote.reserve(Reservation(key="a", model="m", num_tokens=60))
        with pytest.raises(QueueFullError) as refused:
            await remote.reserve(Reservation(key="a", model="m", num_tokens=101))
        assert refused.value.retry_after_s == 3.0
        await remote.settle(Used(ticket=first.ticket, num_tokens=7))
        await remote.settle(Used(ticket=first.ticket, num_tokens=7))  # once is enough
        await remote.reserve(Reservation(key="b", model="m"))  # answered behind both
        assert limiter.settled == [Used(ticket=first.ticket, num_tokens=7)]
        await served.close()
        assert Used(ticket=second.ticket, num_tokens=60) in limiter.settled


def test_workers_see_what_the_others_count() -> None:
    descriptor = SharedCounts.memory(3)
    try:
        views = [SharedCounts(descriptor, 3, row, seed=1) for row in range(3)]
    finally:
        os.close(descriptor)
    for count, view in enumerate(views):
        view.gauge("connections").set(10**count)
        view.named("addresses").add("10.0.0.1", count)
        view.named("sequences").gauge("model").set(count)
    assert [view.gauge("connections").elsewhere for view in views] == [110, 101, 11]
    assert [view.named("addresses").elsewhere("10.0.0.1") for view in views] == [3, 2, 1]
    assert [view.named("sequences").gauge("model").elsewhere for view in views] == [3, 2, 1]
    assert views[0].gauge("requests").elsewhere == 0
    views[0].clear(2)
    assert views[0].gauge("connections").elsewhere == 10
    assert views[1].named("addresses").elsewhere("10.0.0.1") == 0


def test_metrics_of_several_processes_add(metrics: Metrics) -> None:
    """Counters, and the buckets and sums of histograms."""
    other = metrics.with_others([])
    for each, seconds in ((metrics, 0.5), (other, 1000.0)):
        each.grammar_compiled(seconds)
        each.grammar_refused("invalid")
        each.parser_fell_back("derived")
        each.count_key("ann", KeyUsage(requests=1, prompt_tokens=3, completion_tokens=5))
        each.begin(1, 64)
        each.finish("stop", 3, 5, seconds)
        each.count_http("/v1/models", "GET", 200)
    text = metrics.with_others([other.counts()]).render().decode()
    assert 'request_success_total{finished_reason="stop",model_name="m"} 2.0' in text
    assert 'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 2.0' in text
    assert 'e2e_request_latency_seconds_sum{model_name="m"} 1000.5' in text
    assert 'e2e_request_latency_seconds_bucket{le="0.5",model_name="m"} 1.0' in text
    assert 'request_prompt_tokens_count{model_name="m"} 2.0' in text
    assert 'grammar_compile_time_seconds_sum{model_name="m"} 1000.5' in text
    assert 'grammar_refusals_total{model_name="m",reason="invalid"} 2.0' in text
    assert 'parser_fallbacks_total{model_name="m",reason="derived"} 2.0' in text
    assert 'key_requests_total{key="ann",model_name="m"} 2.0' in text
    assert 'key_generation_tokens_total{key="ann",model_name="m"} 10.0' in text
    sent = msgspec.msgpack.encode(metrics.counts())
    assert msgspec.msgpack.decode(sent, type=MetricCounts) == metrics.counts()
    assert metrics.counts().counters["request_success"][0] == (("stop",), 1), (
        "a sum leaves its parts as they are"
    )


def test_metrics_of_a_core_are_those_of_a_process_that_is_connected(metrics: Metrics) -> None:
    """A process that never opened a model shows it as the others do; one that left it knows less
    than one that did not, even where that has a new core."""
    metrics.finish("stop", 3, 5, 0.5)
    opened, left = Metrics("m", CoreStats, {}), Metrics("m", CoreStats, {})
    opened.follow(lambda: CoreStats(num_steps=2, generation_tokens=7), {"block_size": 32})
    left.follow(lambda: CoreStats(num_steps=9, generation_tokens=40), {"block_size": 16})
    left.is_open = False
    for asked in (Metrics.elsewhere("m"), left):
        text = asked.with_others([metrics.counts(), opened.counts(), left.counts()]).render()
        assert b'generation_tokens_total{model_name="m"} 7.0' in text
        assert b'cache_config_info{block_size="32",model_name="m"} 1.0' in text
        assert b'request_success_total{finished_reason="stop",model_name="m"} 1.0' in text


@pytest.mark.parametrize("how", ["told", "scraped", "asked"])
async def test_counts_of_a_worker_outlive_it(
    metrics: Metrics, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it told by itself, those of its own scrape, or those that it was asked for."""
    monkeypatch.setattr(
        "vllmx_server.host.workers.supervisor.COUNT_S", 30.0 if how == "asked" else 0.1
    )
    counted, nothing = Counted(), {"m": Metrics("m", CoreStats, {}).counts()}
    for _ in range(3):
        metrics.finish("stop", 3, 5, 0.5)

    async def count() -> ModelCounts:
        if how != "asked":
            await asyncio.get_running_loop().create_future()
        return {"m": metrics.counts()}

    async def total(channel: Channel) -> int:
        found = await channel.ask("metrics", nothing, list[ModelCounts])
        return sum(
            dict(each["m"].counters["request_success"])[("stop",)] for each in found if "m" in each
        )

    async with channels() as (to_asking, asking), channels() as (to_worker, worker):
        counted.serve(to_asking)
        counted.serve(to_worker)
        worker.serve(count=count)
        if how == "told":
            worker.tell("counted", {"m": metrics.counts()})
        elif how == "scraped":
            await worker.ask("metrics", {"m": metrics.counts()}, list[ModelCounts])
        assert await total(asking) == 3
        worker.close()
        await to_worker.gone.wait()
        assert await total(asking) == 3
        counted.bury(to_worker)
        assert await total(asking) == 3


async def test_usage_of_a_worker_is_with_the_supervisor_as_a_request_ends() -> None:
    book = UsageLedger()
    async with channels() as (supervisor, worker):
        heard = asyncio.Event()

        async def used(more: dict[str, KeyUsage]) -> None:
            book.add(more)
            heard.set()

        async def usage() -> dict[str, KeyUsage]:
            return dict(await book.all())

        supervisor.serve(used=used, usage=usage)
        remote = RemoteUsage(worker)
        for tokens in (3, 4):
            remote.of("ann").requests += 1
            remote.of("ann").completion_tokens += tokens
            remote.changed()
        assert await remote.all() == {"ann": KeyUsage(requests=2, completion_tokens=7)}
        assert heard.is_set()
    assert await book.all() == {"ann": KeyUsage(requests=2, completion_tokens=7)}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m", CoreStats, {"block_size": 16})


# --- connections ----------------------------------------------------------------------------------
class Handing:
    """A dispatcher with three workers in this process, which take what they are handed."""

    def __init__(self) -> None:
        self.memory = SharedCounts.memory(3)
        self.listening = socket.create_server(("127.0.0.1", 0))
        counts = [SharedCounts(self.memory, 3, row, 1) for row in range(3)]
        self.counts = [each.gauge("connections") for each in counts]
        self.dispatcher = Dispatcher(self.listening, lambda: None, counts[0], 3)
        self.mailboxes = [
            Mailbox(os.dup(self.dispatcher.mailbox(row)), counts[row].gauge("received"))
            for row in range(3)
        ]
        for mailbox in self.mailboxes:
            mailbox.setblocking(False)
        self.taken: list[list[socket.socket]] = [[], [], []]
        self.clients: list[socket.socket] = []

    def connect(self, count: int) -> None:
        for _ in range(count):
            self.clients.append(socket.create_connection(self.listening.getsockname()))

    def take(self, *rows: int) -> None:
        for row in rows:
            with suppress(BlockingIOError):
                while True:
                    self.taken[row].append(self.mailboxes[row].accept()[0])
                    self.counts[row].set(len(self.taken[row]))

    async def all_come(self, count: int, *rows: int) -> list[int]:
        """How many connections each has, once these workers have taken so many."""

        def taken() -> bool:
            self.take(*rows)
            return sum(len(self.taken[row]) for row in rows) >= count

        await until(taken)
        return [len(each) for each in self.taken]

    def close(self) -> None:
        self.dispatcher.close()
        for each in (*chain(*self.taken), *self.clients, *self.mailboxes, self.listening):
            each.close()
        os.close(self.memory)


@pytest.fixture
async def handing() -> AsyncIterator[Handing]:
    found = Handing()
    try:
        yield found
    finally:
        found.close()


async def test_connections_go_to_who_has_the_fewest(handing: Handing) -> None:
    for row in range(3):
        handing.dispatcher.opened(row)
    handing.connect(30)
    assert await handing.all_come(30, 0, 1, 2) == [10, 10, 10]
    for each in handing.taken[1][2:]:
        each.close()
    del handing.taken[1][2:]
    handing.counts[1].set(2)
    handing.connect(8)
    assert await handing.all_come(30, 0, 1, 2) == [10, 10, 10]
    peers = {each.getpeername() for each in chain(*handing.taken)}
    assert peers <= {each.getsockname() for each in handing.clients}


async def test_a_worker_that_takes_nothing_is_left_out(handing: Handing) -> None:
    for row in (0, 1):
        handing.dispatcher.opened(row)
    handing.connect(60)
    assert await handing.all_come(44, 0) == [44, 0, 0]
    assert await handing.all_come(60, 0, 1) == [44, 16, 0]


async def test_others_get_what_a_worker_has_not_taken(handing: Handing) -> None:
    handing.connect(12)  # before anybody serves
    for row in (0, 1):
        handing.dispatcher.opened(row)
    assert await handing.all_come(6, 0) == [6, 0, 0]
    handing.dispatcher.left(1)
    assert await handing.all_come(12, 0) == [12, 0, 0]
    handing.dispatcher.left(0)
    handing.connect(2)
    handing.dispatcher.opened(2)
    assert await handing.all_come(2, 2) == [12, 0, 2]


async def test_a_client_that_left_before_it_was_taken(handing: Handing) -> None:
    handing.dispatcher.opened(0)
    handing.connect(1)
    client = handing.clients[0]
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    handing.connect(1)

    def taken() -> bool:
        with suppress(ConnectionAbortedError):
            handing.take(0)
        return len(handing.taken[0]) >= 1

    await until(taken)
