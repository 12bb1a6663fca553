"""Work in slices: clients take turns, and nobody's work outlives them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from vllmx_core.errors import EngineDeadError
from vllmx_engine.audio.slices import Sliced, SliceThreads, finished

from tests.waiting import PATIENCE_S


@pytest.fixture
def threads() -> Iterator[SliceThreads]:
    made = SliceThreads()
    yield made
    made.close()


class Work:
    """Slices that note their client and wait for `go_on`."""

    def __init__(self, client: str, log: list[str], go_on: threading.Event) -> None:
        self.client, self.log, self.go_on = client, log, go_on
        self.begun = threading.Event()

    def slices(self, count: int) -> Sliced[str]:
        for _ in range(count):
            self.log.append(self.client)
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
            yield
        return self.client


async def has_begun(work: Work) -> None:
    assert await asyncio.to_thread(work.begun.wait, PATIENCE_S)


async def test_a_result_and_an_error(threads: SliceThreads) -> None:
    def wrong() -> Sliced[None]:
        yield
        raise ValueError("wrong")

    go_on = threading.Event()
    go_on.set()
    work = Work("a", [], go_on)
    assert await threads.run("a", work.slices(3)) == finished(work.slices(0)) == "a"
    assert work.log == ["a"] * 3
    with pytest.raises(ValueError, match="wrong"):
        await threads.run("a", wrong())


async def test_work_that_is_cancelled_ends_behind_its_slice(threads: SliceThreads) -> None:
    """Its worker is free for others, and its client's turn too."""
    go_on, log = threading.Event(), list[str]()
    works = [Work(name, log, go_on) for name in "aab"]
    tasks = [asyncio.create_task(threads.run(work.client, work.slices(1000))) for work in works]
    await has_begun(works[0])
    await has_begun(works[2])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log.count("a") == log.count("b") == 1  # the other one of a waited for its turn
    go_on.set()
    for name in "ab":
        after = Work(name.upper(), log, go_on)
        assert await threads.run(name, after.slices(2)) == name.upper()
    assert log[2:] == ["A", "A", "B", "B"]


async def test_clients_take_turns(threads: SliceThreads) -> None:
    """One with many works has no more slices than the others."""
    go_on, log = threading.Event(), list[str]()
    many = [Work("many", log, go_on) for _ in range(6)]
    few = [Work(name, log, go_on) for name in ("x", "y")]
    tasks = [asyncio.create_task(threads.run(one.client, one.slices(4))) for one in many + few]
    await has_begun(many[0])
    await has_begun(few[0])
    go_on.set()
    await asyncio.gather(*tasks)
    assert log.count("many") == 24
    last = max(at for at, name in enumerate(log) if name != "many")
    assert log[: last + 1].count("many") <= 4 + 2  # its own four turns, and one on each thread


async def test_closing_ends_all(threads: SliceThreads) -> None:
    go_on, log = threading.Event(), list[str]()
    works = [Work(name, log, go_on) for name in "abc"]
    tasks = [asyncio.create_task(threads.run(one.client, one.slices(1000))) for one in works]
    await has_begun(works[0])
    await has_begun(works[1])
    threads.close()
    go_on.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(log) == ["a", "b"]
    assert [type(end) for end in ends] == [EngineDeadError] * 2 + [asyncio.CancelledError]
