"""Batches of Messages: Anthropic's view of a batch, and of its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import BinaryIO

import msgspec

from vllmx_server.apis.batches.answers import MessageBatch, MessageBatchCounts
from vllmx_server.apis.batches.files import Files
from vllmx_server.apis.batches.schema import BatchedMessage
from vllmx_server.apis.batches.store import Batch
from vllmx_server.errors import BodyTooLargeError, MessagesError, MessagesErrorFields
from vllmx_server.schema.record import encode

PREFIX = "msgbatch_"
PURPOSE = "message_batch"
"""The purpose of files that no client uploaded; lists of files leave them out."""
URL = "/v1/messages"
_PIECE = 256 << 10
_ENDS = {"batch_expired": "expired", "batch_cancelled": "canceled"}


def input_lines(requests: Iterable[BatchedMessage], max_line_bytes: int) -> bytes:
    """The input file of a batch. Raises BodyTooLargeError for a request that is too long for a
    line."""
    lines = []
    for each in requests:
        line = encode({"custom_id": each.custom_id, "url": URL, "body": each.params})
        line = line.replace(b"\r", b" ").replace(b"\n", b" ")  # JSON has them only between values
        if len(line) >= max_line_bytes:
            raise BodyTooLargeError(
                f"request {each.custom_id} has over {max_line_bytes} bytes with its id: shorten it,"
                " or raise --max-body-bytes"
            )
        lines.append(line + b"\n")
    return b"".join(lines)


def shown(batch: Batch) -> MessageBatch:
    """The object in the form of Anthropic's API."""
    has_ended, unanswered = not batch.is_open, batch.unanswered
    total = batch.num_requests
    cancels = batch.status == "cancelling"
    cancelled_at = batch.times.get("cancelling")
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if has_ended else "canceling" if cancels else "in_progress",
        request_counts=MessageBatchCounts(
            processing=0 if has_ended else total,
            succeeded=batch.completed if has_ended else 0,
            errored=total - batch.completed - unanswered if has_ended else 0,
            canceled=unanswered if batch.status == "cancelled" else 0,
            expired=unanswered if batch.status == "expired" else 0,
        ),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_time(batch.times.get(batch.status, batch.created_at)) if has_ended else None,
        cancel_initiated_at=None if cancelled_at is None else _time(cancelled_at),
        results_url=f"{URL}/batches/{batch.id}/results" if has_ended else None,
    )


def _time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Answer(msgspec.Struct):
    """A line of the files of a batch that has ended."""

    custom_id: str
    response: _Response | None
    error: _Error | None


_decode = msgspec.json.Decoder(_Answer).decode


async def results(batch: Batch, files: Files) -> AsyncIterator[bytes]:
    """A line for each request, in pieces: those that succeeded first."""
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        async with aclosing(_lines(files, file_id)) as pieces:
            async for lines in pieces:
                yield b"".join(map(_result, lines))


async def _lines(files: Files, file_id: str) -> AsyncGenerator[list[bytes], None]:
    file: BinaryIO = await files.on_thread(lambda: files.path(file_id).open("rb"))
    try:
        while lines := await files.on_thread(partial(file.readlines, _PIECE)):
            yield lines
    finally:
        await files.on_thread(file.close)


def _result(line: bytes) -> bytes:
    answer = _decode(line)
    found: dict[str, object]
    if answer.response is None:
        assert answer.error is not None
        end = _ENDS.get(answer.error.code)
        error = MessagesErrorFields(type="api_error", message=answer.error.message)
        found = {"type": end} if end else {"type": "errored", "error": MessagesError(error=error)}
    elif answer.response.status_code < 400:
        found = {"type": "succeeded", "message": answer.response.body}
    else:
        found = {"type": "errored", "error": answer.response.body}
    return encode({"custom_id": answer.custom_id, "result": found}) + b"\n"
