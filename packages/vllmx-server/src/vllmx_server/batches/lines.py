"""The lines of a batch, answered as there are places for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from vllmx_server.batches.answers import AnswerWriter
from vllmx_server.batches.input import read_line
from vllmx_server.batches.line import Answer, LineAnswerer, unanswered
from vllmx_server.batches.places import Places
from vllmx_server.store.batches import Batch, Batches, Line, LineState
from vllmx_server.store.files import Files

_PAGE = 64
_PAUSE_S = 0.2
_MAX_LOSSES = 3
"""A line that is being answered whenever the engine dies is given up then."""
_ENGINE_LOST = ("engine_unavailable", "step_timeout")


class LineRunner:
    """Answers lines of any batches.

    Args:
        is_ready: whether the engine takes requests.
    """

    def __init__(
        self,
        batches: Batches,
        files: Files,
        answerer: LineAnswerer,
        places: Places,
        writer: AnswerWriter,
        is_ready: Callable[[], bool],
    ) -> None:
        self._batches = batches
        self._files = files
        self._answerer = answerer
        self._places = places
        self._writer = writer
        self._is_ready = is_ready
        self._suspects = asyncio.Lock()

    async def run(self, batch: Batch, path: Path) -> None:
        """Returns when every line of the batch has an answer; cancelling takes out of the engine
        what has none. Raises StorageError."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while await self._begin_all(batch, path, tasks):
                await asyncio.gather(*tasks)
                tasks.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin_all(self, batch: Batch, path: Path, tasks: set[asyncio.Task[None]]) -> bool:
        """Whether there were any."""
        after = 0
        while page := await self._batches.waiting(batch.id, after, _PAGE):
            for line in page:
                after = line.number
                await self._places.take()
                tasks.add(asyncio.ensure_future(self._answer(batch, path, line)))
                await asyncio.sleep(0)  # others are served between the beginnings of two lines
            for task in [task for task in tasks if task.done()]:
                tasks.discard(task)
                task.result()
        return after > 0

    async def _answer(self, batch: Batch, path: Path, line: Line) -> None:
        """Has a place, and gives it back."""
        try:
            data = await self._files.on_thread(lambda: _read(path, line))
            request = read_line(data)
            answer = await self._attempt(batch, line, request.url, bytes(request.body))
        finally:
            self._places.leave()
        if answer is None:
            text = f"the engine ended {_MAX_LOSSES} times while this line was being answered"
            state, record = LineState.FAILED, unanswered(line.custom_id, "engine_lost", text)
        else:
            state, record = answer.state, answer.record(line.custom_id)
        await self._writer.write((batch.id, line.number, state, record))
        if state is LineState.ANSWERED:
            batch.completed += 1
        else:
            batch.failed += 1

    async def _attempt(self, batch: Batch, line: Line, url: str, body: bytes) -> Answer | None:
        """None: the engine was lost too often."""
        losses = line.losses
        while losses < _MAX_LOSSES:
            while not self._is_ready():
                await asyncio.sleep(_PAUSE_S)
            if losses:
                async with self._suspects:  # so that the guilty one does not take others along
                    answer = await self._answerer.answer(url, body, batch.owner)
            else:
                answer = await self._answerer.answer(url, body, batch.owner)
            if answer.code in _ENGINE_LOST:
                losses += 1
                await self._batches.count_loss(batch.id, line.number)
            elif answer.status not in (429, 503):
                return answer
            await asyncio.sleep(_PAUSE_S)
        return None


def _read(path: Path, line: Line) -> bytes:
    with path.open("rb") as file:
        file.seek(line.start)
        return file.read(line.length)
