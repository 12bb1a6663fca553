"""The files of a batch that has ended: answers, and what failed or was not answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec

from vllmx_server.apis.batches.answers import Status
from vllmx_server.apis.batches.files import MESSAGES, Files, StoredFile
from vllmx_server.apis.batches.lines import unanswered
from vllmx_server.apis.batches.store import PREFIX, Batch, Batches, LineState, save
from vllmx_server.store.database import now

_PAGE = 256
_REASONS = {
    "expired": ("batch_expired", "the batch expired before this line was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
}


async def finish(batch: Batch, status: Status, batches: Batches, files: Files) -> Batch:
    """Writes the files, and with them in one transaction how the batch ended, which is returned:
    nobody sees it before. May be called again after a crash."""
    unanswered = await batches.num_waiting(batch.id)
    kept: list[tuple[StoredFile, Path]] = []
    ids: dict[str, str] = {}
    for name, records in (
        ("output", _answers(batch, LineState.ANSWERED, batches)),
        ("errors", _errors(batch, status, batches)),
    ):
        path = await files.on_thread(files.new_path)
        num_bytes = await _write(path, records, files)
        if not num_bytes:
            await files.on_thread(partial(path.unlink, missing_ok=True))
            continue
        found = files.new_file(
            batch.owner,
            f"{batch.id}_{name}.jsonl",
            "batch_output" if batch.id.startswith(PREFIX) else f"{MESSAGES}_output",
            num_bytes,
            batch.output_lifetime_s,
        )
        kept.append((found, path))
        ids[name] = found.id
    ended = msgspec.structs.replace(
        batch,
        status=status,
        times={**batch.times, status: now()},
        failed=batch.total - batch.completed,
        unanswered=unanswered,
        output_file_id=ids.get("output"),
        error_file_id=ids.get("errors"),
    )
    await files.keep(kept, lambda connection: save(connection, ended))
    return ended


async def _write(path: Path, records: AsyncIterator[bytes], files: Files) -> int:
    num_bytes, held = 0, bytearray()
    out = await files.on_thread(lambda: path.open("xb"), lambda file: file.close())
    try:
        async for record in records:
            held += record
            if len(held) >= 1 << 20:
                data, held = bytes(held), bytearray()
                num_bytes += await files.on_thread(partial(out.write, data))
        num_bytes += await files.on_thread(partial(out.write, held))
    finally:
        await files.on_thread(out.close)
    return num_bytes


async def _answers(batch: Batch, state: LineState, batches: Batches) -> AsyncIterator[bytes]:
    after = 0
    while page := await batches.answers(batch.id, state, after, _PAGE):
        for number, answer in page:
            after = number
            yield answer


async def _errors(batch: Batch, status: Status, batches: Batches) -> AsyncIterator[bytes]:
    async for record in _answers(batch, LineState.FAILED, batches):
        yield record
    after = 0
    while page := await batches.waiting(batch.id, after, _PAGE):
        for line in page:
            after = line.number
            yield unanswered(line.custom_id, *_REASONS[status])
