"""Files and batches of a server, and the work on batches that have not ended."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError, VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.apis.batches.answers import BatchError, Status
from vllmx_server.apis.batches.files import FileNotKnownError, Files, Quota
from vllmx_server.apis.batches.input import InputReader
from vllmx_server.apis.batches.lines import LineAnswerer, LineRunner, LineSlots
from vllmx_server.apis.batches.output import finish
from vllmx_server.apis.batches.store import Batch, Batches
from vllmx_server.config import ServerConfig
from vllmx_server.generating.served import Served, served_of
from vllmx_server.store.database import Storage, logger, now

_PAGE = 1000
_TRY_AGAIN_S = 5.0


class BatchRunner:
    """Each batch is a task; their lines take turns for the slots that others leave.

    Args:
        max_line_bytes: of a line of an input.
    """

    def __init__(
        self, batches: Batches, files: Files, lines: LineRunner, max_line_bytes: int
    ) -> None:
        self._batches = batches
        self._files = files
        self._lines = lines
        self._max_line_bytes = max_line_bytes
        self._open: dict[str, Batch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}

    def num_open(self, owner: str) -> int:
        """Batches of a key that have not ended."""
        return sum(batch.owner == owner for batch in self._open.values())

    def reader_of(self, file_id: str) -> Batch | None:
        """An open batch whose input this file is."""
        return next((b for b in self._open.values() if b.input_file_id == file_id), None)

    def newest(self, batch: Batch) -> Batch:
        """The batch as it is now, with the counts of this moment."""
        return self._open.get(batch.id, batch)

    def begin(self, batch: Batch) -> None:
        """Works on it from now on."""
        self._open[batch.id] = batch
        self._tasks[batch.id] = asyncio.ensure_future(self._work(batch))

    async def resume(self) -> None:
        """Goes on with what an earlier server left."""
        for batch in await self._batches.open_ones():
            self.begin(batch)

    async def cancel(self, batch: Batch) -> Batch:
        """Answers no further line. Raises InvalidRequestError where it has ended."""
        batch = self.newest(batch)
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise InvalidRequestError(
                f"batch {batch.id} is {batch.status}: only one that is being worked on can be"
                " cancelled"
            )
        if batch.status != "cancelling":
            _enter(batch, "cancelling")
            await self._batches.save(batch)
            answering = self._answering.get(batch.id)
            if answering is not None:
                answering.cancel()
        return batch

    async def stop(self) -> None:
        """Takes everything out of the engine; lines without an answer wait for the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._lines.finish()

    # --- one batch --------------------------------------------------------------------------------
    async def _work(self, batch: Batch) -> None:
        try:
            while batch.is_open:
                try:
                    await self._advance(batch)
                except VllmxError as error:  # a full disk may have room again
                    logger.error("batch %s waits: %s", batch.id, error.message)
                    await asyncio.sleep(_TRY_AGAIN_S)
        except Exception as error:
            logger.error("batch %s has stopped\n%s", batch.id, private_traceback(error))
        finally:
            if not batch.is_open:
                self._open.pop(batch.id, None)
            self._tasks.pop(batch.id, None)

    async def _advance(self, batch: Batch) -> None:
        if batch.status == "validating":
            await self._validate(batch)
        if batch.status == "in_progress":
            await self._answer(batch)
        elif batch.status == "cancelling":
            await self._finish(batch, "cancelled")
        elif batch.status == "finalizing":
            is_late = "expiring" in batch.times
            status: Status = "expired" if is_late else "completed"
            await self._finish(batch, status)

    async def _finish(self, batch: Batch, status: Status) -> None:
        ended = await finish(batch, status, self._batches, self._files)
        for name in ended.__struct_fields__:
            setattr(batch, name, getattr(ended, name))

    async def _validate(self, batch: Batch) -> None:
        try:
            known = await self._files.get(batch.owner, batch.input_file_id)
        except FileNotKnownError as error:
            await self._fail(batch, [BatchError("file_not_found", error.message)])
            return
        open_input = partial(
            InputReader, self._files.path(known.id), batch.endpoint, self._max_line_bytes
        )
        reader = await self._files.on_thread(open_input, InputReader.finish)
        batch.total = 0
        await self._batches.begin_lines(batch.id)
        try:
            while lines := await self._files.on_thread(lambda: reader.read(_PAGE)):
                await self._batches.add_lines(batch.id, lines)
                batch.total += len(lines)
        finally:
            reader.finish()
        if batch.status != "validating":
            return
        if reader.errors:
            await self._fail(batch, reader.errors)
            return
        _enter(batch, "in_progress")
        await self._batches.save(batch)

    async def _fail(self, batch: Batch, errors: list[BatchError]) -> None:
        batch.errors, batch.total = errors, 0
        _enter(batch, "failed")
        await self._batches.save(batch)

    async def _answer(self, batch: Batch) -> None:
        answering = asyncio.ensure_future(
            self._lines.run(batch, self._files.path(batch.input_file_id))
        )
        self._answering[batch.id] = answering
        try:
            done, _ = await asyncio.wait((answering,), timeout=max(0, batch.expires_at - now()))
        finally:
            answering.cancel()
            await asyncio.wait((answering,))
            del self._answering[batch.id]
        if batch.status == "cancelling":
            return
        if not done:
            batch.times["expiring"] = now()
        else:
            answering.result()
        _enter(batch, "finalizing")
        await self._batches.save(batch)


def _enter(batch: Batch, status: Status) -> None:
    batch.status = status
    batch.times[status] = now()


class KeptFiles:
    """Files, and batches over them.

    Attributes:
        runner: works on the batches; set before the first request.
    """

    def __init__(self, config: ServerConfig, storage: Storage) -> None:
        quota = Quota(config.max_stored_bytes, config.max_stored_files)
        self.files = Files(storage.database, storage.folder, quota, config.lifetime_s)
        self.batches = Batches(storage.database, config.max_stored_files)
        self.runner: BatchRunner
        self._lifetime_s = config.lifetime_s

    async def clean(self) -> None:
        """Deletes what is too old."""
        await self.files.clean()
        await self.batches.forget_before(now() - self._lifetime_s)


def kept_of(request: Request) -> KeptFiles:
    """The files and batches of the request's server."""
    return served_of(request).store(KeptFiles)


def batch_runner(kept: KeptFiles, served: Served) -> BatchRunner:
    """The runner of a server, whose lines take the rows that other requests leave free."""
    llm = served.llm
    slots = LineSlots(
        lambda: llm.info.max_num_seqs, lambda: max(0, llm.num_in_flight - slots.num_taken)
    )
    assert served.app is not None
    lines = LineRunner(
        kept.batches,
        kept.files,
        LineAnswerer(served.app, served.endpoints),
        slots,
        lambda: llm.is_ready or served.sleeps_idle,
    )
    return BatchRunner(kept.batches, kept.files, lines, served.config.max_body_bytes)
