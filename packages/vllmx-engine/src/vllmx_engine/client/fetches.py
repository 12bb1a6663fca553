"""Fetches images, all of a request within one deadline. A slow host delays only its own images."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from vllmx_core.errors import QueueFullError
from vllmx_core.system.deadline import Deadline

from vllmx_engine.client.chat_images import Pictures
from vllmx_engine.images.source import FETCH_S

_THREADS = 64
_TOGETHER = 4
"""Images that one client fetches from one host at a time."""


class Fetches:
    """Fetches images of conversations on threads. A client's images from one host wait only for
    each other."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "vllmx-images")
        self._shares: dict[tuple[str, str], _Share] = {}

    async def fetch(self, pictures: Pictures, client: str) -> None:
        """Fetches the images that are not inline, within `FETCH_S` in all. May be cancelled. Raises
        the first error: InvalidRequestError, or QueueFullError if an image never had its turn."""
        gone = threading.Event()
        deadline = Deadline(FETCH_S, gone.is_set)
        tasks = [
            asyncio.create_task(self._fetch(pictures, index, client, deadline))
            for index in pictures.far
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            gone.set()
            for task in tasks:
                task.cancel()

    async def _fetch(self, pictures: Pictures, index: int, client: str, deadline: Deadline) -> None:
        host = pictures.source(index).host
        share = self._shares.setdefault((client, host), _Share())
        share.num_users += 1
        try:
            await _enter(share, host, deadline)
            try:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, pictures.fetch, index, deadline)
            finally:
                share.turns.release()
        finally:
            share.num_users -= 1
            if not share.num_users:
                del self._shares[client, host]

    def close(self) -> None:
        """Drops the fetches that wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Share:
    """What one client fetches from one host."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(_TOGETHER)
        self.num_users = 0


async def _enter(share: _Share, host: str, deadline: Deadline) -> None:
    try:
        async with asyncio.timeout(deadline.left_s(deadline.seconds)):
            await share.turns.acquire()
    except TimeoutError:
        raise QueueFullError(
            f"{_TOGETHER} images of {host or 'this machine'} are being fetched already, and none"
            f" came within {deadline.seconds:g} s: send the request again in a moment"
        ) from None
