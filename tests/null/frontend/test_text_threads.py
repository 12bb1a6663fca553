"""Text on threads: turns, budgets, and work that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from vllmx_core.errors import QueueFullError
from vllmx_engine.text import text_threads
from vllmx_engine.text.text_threads import Stopped, TextLimits, TextThreads

from tests.waiting import PATIENCE_S

SMALL, LARGE = 10, 1000
LIMITS = TextLimits(small_bytes=SMALL)
NARROW = TextLimits(client_bytes=4000, all_bytes=8000, small_bytes=SMALL)


class Bench:
    """Threads whose large one is held, and the order in which work was done."""

    def __init__(self, limits: TextLimits = LIMITS) -> None:
        self.threads = TextThreads(limits)
        self.gate = threading.Event()
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def hold(self, client: str = "holder") -> None:
        """Lets the thread of large texts wait for the gate."""
        held = threading.Event()

        def wait(_: Stopped) -> None:
            held.set()
            self.gate.wait()

        await self.start(self.threads.run(client, LARGE, wait))
        await asyncio.to_thread(held.wait)

    async def add(self, client: str, name: str, size: int = LARGE) -> asyncio.Task[Any]:
        def work(_: Stopped) -> str:
            self.order.append(name)
            return name

        return await self.start(self.threads.run(client, size, work))

    async def done(self, task: asyncio.Task[Any]) -> Any:
        """What a text comes to that waits for nothing that is held."""
        try:
            return await asyncio.wait_for(task, PATIENCE_S)
        finally:
            if not task.done() or task.cancelled():
                self.gate.set()

    async def finish(self) -> list[str]:
        self.gate.set()
        await asyncio.gather(*self.tasks)
        self.threads.close()
        assert self.threads.num_bytes == 0
        assert not self.threads._clients
        return self.order


async def test_a_small_text_waits_for_no_large_one() -> None:
    bench = Bench()
    await bench.hold()
    await bench.add("a", "large")
    assert await (await bench.add("a", "small", SMALL)) == "small"
    assert await bench.finish() == ["small", "large"]


async def test_no_client_has_all_threads() -> None:
    """Small texts may be slow, too: while one client has both threads, others have a third."""
    bench = Bench()
    slow = threading.Semaphore(0)

    def hold(_: Stopped) -> None:
        slow.release()
        bench.gate.wait()

    for _ in range(2):
        await bench.start(bench.threads.run("a", SMALL, hold))
    await bench.add("a", "a's third", SMALL)
    for _ in range(2):
        await asyncio.to_thread(slow.acquire)
    for name in ("b", "c"):
        assert await bench.done(await bench.add(name, name, SMALL)) == name
    assert bench.order == ["b", "c"]
    assert await bench.finish() == ["b", "c", "a's third"]


async def test_others_that_came_before_a_client_had_all_threads_are_served() -> None:
    bench = Bench()
    await bench.hold("a")
    rest, begun = threading.Event(), threading.Event()
    bench.threads._small.submit(rest.wait)

    def hold(_: Stopped) -> None:
        begun.set()
        bench.gate.wait()

    await bench.start(bench.threads.run("a", SMALL, hold))
    bench.threads._clients["a"].served = -LARGE  # it is a's turn
    small = await bench.add("b", "b", SMALL)
    rest.set()
    await asyncio.to_thread(begun.wait)
    assert await bench.done(small) == "b"
    assert await bench.finish() == ["b"]


async def test_clients_take_turns() -> None:
    bench = Bench()
    await bench.hold("a")
    for name in ("a1", "a2", "a3"):
        await bench.add("a", name)
    for name in ("b1", "b2"):
        await bench.add("b", name)
    await bench.add("c", "c1")
    order = await bench.finish()
    assert order.index("b1") < order.index("a1")
    assert order.index("c1") < order.index("b2")
    assert order[-1] == "a3"


async def test_many_small_texts_do_not_starve_a_large_one_of_the_same_client() -> None:
    bench = Bench()
    await bench.hold()
    rest = threading.Event()
    bench.threads._small.submit(rest.wait)
    await bench.add("a", "large")
    for _ in range(150):
        await bench.add("a", "small", SMALL)
    order = await bench.finish()
    rest.set()
    assert order.index("large") == LARGE // SMALL


async def test_errors_are_raised_to_who_waits() -> None:
    threads = TextThreads(LIMITS)

    def fail(_: Stopped) -> None:
        raise QueueFullError("no")

    for size in (SMALL, LARGE):
        with pytest.raises(QueueFullError, match="no"):
            await threads.run("a", size, fail)
    assert threads.num_bytes == 0
    threads.close()


async def test_the_budget_of_a_client_and_of_all() -> None:
    bench = Bench(NARROW)
    await bench.hold("a")
    for index in range(2):
        await bench.add("a", f"a{index}")
    with pytest.raises(QueueFullError, match="3000 bytes of text of this client") as caught:
        await bench.threads.run("a", LARGE, lambda _: None)
    assert caught.value.http_status == 429
    await bench.add("a", "small", SMALL)  # a part is kept for these
    for index in range(3):
        await bench.add("b", f"b{index}")
    with pytest.raises(QueueFullError, match="of all clients"):
        await bench.threads.run("c", LARGE, lambda _: None)
    await bench.add("c", "small", SMALL)
    await bench.finish()


async def test_what_is_too_large_for_the_budget_is_served_alone() -> None:
    threads = TextThreads(NARROW)
    assert await threads.run("a", 100_000, lambda _: 5) == 5
    assert threads.num_bytes == 0
    threads.close()


async def test_cancelling_takes_back_what_has_not_begun() -> None:
    bench = Bench()
    await bench.hold()
    task = await bench.add("a", "never")
    before = bench.threads.num_bytes
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.threads.num_bytes == before - LARGE
    bench.tasks.remove(task)
    assert await bench.finish() == []


async def test_work_is_told_that_nobody_waits() -> None:
    threads = TextThreads(LIMITS)
    begun, ended = threading.Event(), threading.Event()

    def work(stopped: Stopped) -> None:
        begun.set()
        while not stopped():
            pass
        ended.set()

    task = asyncio.ensure_future(threads.run("a", LARGE, work))
    await asyncio.to_thread(begun.wait)
    assert threads.num_bytes == LARGE
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, PATIENCE_S)
    assert await threads.run("a", LARGE, lambda _: 1) == 1
    assert threads.num_bytes == 0
    threads.close()


async def test_closing_ends_what_waits() -> None:
    bench = Bench()
    await bench.hold()
    task = await bench.add("a", "never")
    bench.threads.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    bench.tasks.remove(task)
    assert await bench.finish() == []


async def test_memory_is_given_back_after_a_large_text(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(text_threads, "_give_back_memory", lambda: calls.append(1))
    threads = TextThreads()
    await threads.run("a", 1000, lambda _: None)
    assert not calls
    await threads.run("a", 1 << 20, lambda _: None)
    assert len(calls) == 1
    threads.close()


def test_giving_back_memory_works_here() -> None:
    text_threads._give_back_memory()
