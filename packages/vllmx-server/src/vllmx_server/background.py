"""What a server does besides answering: batches, and forgetting what is too old."""

from __future__ import annotations

import asyncio
import contextlib
import time

from vllmx_core.errors import VllmxError

from vllmx_server.batches.runner import BatchRunner
from vllmx_server.responses.background import lost
from vllmx_server.store.storage import Storage

_CLEAN_EVERY_S = 600.0
_JUMP_S = 3600.0
"""A clock that moves on by so much at once may be wrong: nothing is forgotten for it before it has
said the same for `_CLEAN_EVERY_S`."""


class Background:
    """Goes on from `start` to `stop`."""

    def __init__(self, storage: Storage, runner: BatchRunner) -> None:
        self._storage = storage
        self._runner = runner
        self._cleaning: asyncio.Task[None] | None = None

    async def start(self, *, takes_over: bool = False) -> None:
        """Starts; with a data folder it goes on with the batches that are there. `takes_over`: from
        another process of this server, which has died; others go on writing files."""
        outlives = self._storage.folder.outlives
        if outlives and not takes_over:
            await self._storage.files.clean_strangers()
        if outlives or takes_over:
            await self._storage.responses.end_open_ones(lost)
            await self._runner.resume()
        self._cleaning = asyncio.ensure_future(self._clean())

    async def stop(self) -> None:
        """Takes batches out of the engine. May be called twice."""
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.wait((self._cleaning,))
            self._cleaning = None
        await self._runner.stop()

    async def _clean(self) -> None:
        ahead_s = _ahead_s()
        while True:
            before_s, ahead_s = ahead_s, _ahead_s()
            if self._storage.database.is_open and ahead_s - before_s < _JUMP_S:
                with contextlib.suppress(VllmxError):  # the log has it
                    await self._storage.clean()
            await asyncio.sleep(_CLEAN_EVERY_S)


def _ahead_s() -> float:
    """How far the clock that may jump is ahead of the one that never does."""
    return time.time() - time.monotonic()
