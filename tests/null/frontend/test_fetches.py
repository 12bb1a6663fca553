"""Images are fetched side by side: those of a slow host hold up nobody else's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from vllmx_core.errors import InvalidRequestError, QueueFullError
from vllmx_core.system.deadline import Deadline
from vllmx_engine.client import async_text
from vllmx_engine.client.async_text import Fetches
from vllmx_engine.client.chat_images import ChatImages, Pictures, Reader
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.processor import ImageProcessor
from vllmx_engine.images.source import ImageSource

from tests.waiting import PATIENCE_S


class Fetched(Pictures):
    """Images of hosts, of which those of `slow` come once `go_on` is set or their end is near."""

    def __init__(self, urls: Sequence[str], go_on: threading.Event) -> None:
        images = ChatImages("model", {"image": Reader(ImageProcessor(), ImageLimits(), 0)})
        super().__init__([ImageSource(url, "there") for url in urls], images)
        self.go_on = go_on
        self.begun = 0

    def fetch(self, index: int, deadline: Deadline | None = None) -> None:
        assert deadline is not None
        self.begun += 1
        while "slow" in self.source(index).url and not self.go_on.wait(0.01):
            deadline.left_s()
        if "wrong" in self.source(index).url:
            raise InvalidRequestError("wrong")


async def begun(pictures: Fetched, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while pictures.begun < count:
            await asyncio.sleep(0.005)


async def test_slow_hosts_hold_up_nobody_else() -> None:
    go_on, all_of = threading.Event(), Fetches()
    slow = [Fetched([f"http://slow{host}/{n}" for n in range(9)], go_on) for host in range(6)]
    waiting = [asyncio.create_task(all_of.fetch(one, "a")) for one in slow]
    try:
        for one in slow:
            await begun(one, 4)
        async with asyncio.timeout(PATIENCE_S):
            await all_of.fetch(Fetched(["http://quick/1"], go_on), "a")
            other = Fetched(["http://slow0/1"], go_on)
            task = asyncio.create_task(all_of.fetch(other, "b"))
            await begun(other, 1)  # of one host, but for another client
        assert [one.begun for one in slow] == [4] * 6
        go_on.set()
        await asyncio.gather(*waiting, task)
        assert [one.begun for one in slow] == [9] * 6
    finally:
        go_on.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        all_of.close()


async def test_an_image_that_never_had_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, all_of = threading.Event(), Fetches()
    slow = Fetched([f"http://slow/{n}" for n in range(4)], go_on)
    task = asyncio.create_task(all_of.fetch(slow, "a"))
    try:
        await begun(slow, 4)
        monkeypatch.setattr(async_text, "FETCH_S", 0.05)
        with pytest.raises(QueueFullError, match="4 images of slow"):
            await all_of.fetch(Fetched(["http://slow/5"], go_on), "a")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        all_of.close()


async def test_the_first_error_ends_the_others() -> None:
    all_of = Fetches()
    pictures = Fetched(["http://slow/1", "http://wrong/1"], threading.Event())
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InvalidRequestError, match="wrong"):
            await all_of.fetch(pictures, "a")
    all_of.close()
