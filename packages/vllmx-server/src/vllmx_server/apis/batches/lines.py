"""The lines of a batch, answered as there are slots for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from vllmx_server.apis.batches.answer_writer import AnswerWriter
from vllmx_server.apis.batches.files import Files
from vllmx_server.apis.batches.input import read_line
from vllmx_server.apis.batches.line import Answer, LineAnswerer, unanswered
from vllmx_server.apis.batches.line_slots import LineSlots
from vllmx_server.apis.batches.store import Batch, Batches, Line, LineState

_PAGE = 64
_PAUSE_S = 0.2
_READ_BYTES = 1 << 20
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
        slots: LineSlots,
        writer: AnswerWriter,
        is_ready: Callable[[], bool],
    ) -> None:
        self._batches = batches
        self._files = files
        self._answerer = answerer
        self._slots = slots
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
            for lines in _together(page):
                data = await self._files.on_thread(partial(_read, path, lines))
                for line in lines:
                    start = line.start - lines[0].start
                    record = data[start : start + line.length]
                    after = line.number
                    await self._slots.take()
                    tasks.add(asyncio.ensure_future(self._answer(batch, line, record)))
                    await asyncio.sleep(0)  # others are served between the beginnings of two lines
            for task in [task for task in tasks if task.done()]:
                tasks.discard(task)
                task.result()
        return after > 0

    async def _answer(self, batch: Batch, line: Line, data: bytes) -> None:
        """Answers a line in a place that it has, and gives the place back."""
        try:
            request = read_line(data)
            answer = await self._attempt(batch, line, request.url, bytes(request.body))
        finally:
            self._slots.leave()
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


def _together(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Lines that are read at once: a turn of a thread costs as much as a third of a short answer.
    What stands between two of them, which have answers, is read as well."""
    held: list[Line] = []
    for line in lines:
        if held and line.start + line.length - held[0].start > _READ_BYTES:
            yield held
            held = []
        held.append(line)
    if held:
        yield held


def _read(path: Path, lines: Sequence[Line]) -> bytes:
    start, last = lines[0].start, lines[-1]
    with path.open("rb") as file:
        file.seek(start)
        return file.read(last.start + last.length - start)
