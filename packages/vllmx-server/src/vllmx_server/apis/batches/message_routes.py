"""/v1/messages/batches: Anthropic's batches of Messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllmx_core.errors import InvalidRequestError

from vllmx_server.apis.batches.answers import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchCounts,
    MessageBatchList,
)
from vllmx_server.apis.batches.files import MESSAGES, FileNotKnownError, Files, StoredFile
from vllmx_server.apis.batches.routes import cancelled, check_room, found_batch
from vllmx_server.apis.batches.runner import KeptFiles, kept_of
from vllmx_server.apis.batches.schema import CREATE_MESSAGES, BatchedMessage, CreateMessageBatch
from vllmx_server.apis.batches.store import Batch
from vllmx_server.errors import BodyTooLargeError, MessagesError, MessagesErrorFields
from vllmx_server.generating.api import keyed
from vllmx_server.generating.reading import checked, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import owner_of
from vllmx_server.http.operation import BODY, HELLO, LIMIT, Media, Operation, Query
from vllmx_server.http.pages import answer, check_query, number, page
from vllmx_server.http.route import Right, Route
from vllmx_server.schema.record import encode
from vllmx_server.store.database import new_id, now

_WINDOW_S = 24 * 3600
"""The time limit of a batch, as in Anthropic's API."""


async def create(request: Request) -> Response:
    """Creates a batch of Messages."""
    served, owner = served_of(request), owner_of(request)
    served.check_admission()

    def parse(data: bytes) -> tuple[int, bytes]:
        body = checked(data, served, CREATE_MESSAGES)
        return len(body.requests), input_lines(body.requests, served.config.max_body_bytes)

    num_requests, lines = await read_json(request, served, parse)
    kept = kept_of(request)
    check_room(kept, owner)
    file = await _kept(served, owner, lines)
    created = now()
    batch = Batch(
        id=new_id(PREFIX),
        owner=owner,
        endpoint=URL,
        input_file_id=file.id,
        completion_window="24h",
        created_at=created,
        expires_at=created + _WINDOW_S,
        model=served.llm.config.name,
        num_requests=num_requests,
    )
    await kept.batches.save(batch)
    begun = answer(shown(batch))
    kept.runner.begin(batch)
    return begun


async def _kept(served: Served, owner: str, lines: bytes) -> StoredFile:
    """The input file of a batch. Raises StorageFullError, StorageError."""
    files, size = served.store(KeptFiles).files, len(lines)
    await files.take(owner, size)
    try:
        path = await files.on_thread(files.new_path)
        await files.on_thread(partial(path.write_bytes, lines))
        lifetime_s = max(served.config.lifetime_s, _WINDOW_S)
        file = files.new_file(owner, "requests.jsonl", MESSAGES, size, lifetime_s)
        await files.keep([(file, path)])
        return file
    finally:
        files.give_back(owner, size)


async def list_batches(request: Request) -> Response:
    """The batches of Messages of this key, the newest first."""
    check_query(request, "after_id", "before_id", "limit", "beta")
    kept, query = kept_of(request), request.query_params
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequestError("give after_id or before_id, not both", param="before_id")
    limit = number(request, "limit", 1, 1000, 20)
    found, has_more = await kept.batches.page(owner_of(request), after, limit, PREFIX, before)
    data = [shown(kept.runner.newest(batch)) for batch in found]
    return page(MessageBatchList, data, has_more)


async def retrieve(request: Request) -> Response:
    """Answers with the state of a batch."""
    return answer(shown(await found_batch(request, PREFIX)))


async def cancel(request: Request) -> Response:
    """Cancels the requests of a batch that have not begun."""
    served, batch = served_of(request), await found_batch(request, PREFIX)
    if batch.status != "finalizing":  # its requests are answered
        batch = await cancelled(served, batch)
    return answer(shown(batch))


async def delete(request: Request) -> Response:
    """Deletes a batch that has ended, with its requests and results."""
    batch, storage = await found_batch(request, PREFIX), kept_of(request)
    if batch.is_open:
        raise InvalidRequestError(
            f"batch {batch.id} has not ended: cancel it, and delete it once it has"
        )
    await storage.batches.delete(batch.id)
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            await storage.files.delete(file_id)
    return answer(DeletedMessageBatch(id=batch.id))


async def show_results(request: Request) -> Response:
    """The results of a batch that has ended: a line of JSON for each request."""
    batch, files = await found_batch(request, PREFIX), kept_of(request).files
    if batch.is_open:
        raise InvalidRequestError(
            f"batch {batch.id} has not ended: fetch its results once its processing_status is ended"
        )
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        try:
            await files.get(batch.owner, file_id)
        except FileNotKnownError:
            raise FileNotKnownError(
                f"the results of batch {batch.id} have expired and were deleted"
            ) from None
    return StreamingResponse(results(batch, files), media_type="application/x-jsonl")


PREFIX = "msgbatch_"
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
    file: BinaryIO = await files.on_thread(
        lambda: files.path(file_id).open("rb"), lambda opened: opened.close()
    )
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


_TAG = "Batches of Messages"
_ONE = "/v1/messages/batches/{id}"
_PARAMS = {"max_tokens": 16, "messages": HELLO}
_KNOWN = Operation(_TAG, MessageBatch, statuses=(404,), is_anthropic=True)
ROUTES = (
    keyed(
        "POST",
        "/v1/messages/batches",
        create,
        _TAG,
        MessageBatch,
        CreateMessageBatch,
        statuses=BODY,
        example={"requests": [{"custom_id": "one", "params": _PARAMS}]},
        is_anthropic=True,
        led=True,
    ),
    keyed(
        "GET",
        "/v1/messages/batches",
        list_batches,
        _TAG,
        MessageBatchList,
        query=(
            Query("after_id", "The id behind which the page begins."),
            Query("before_id", "The page ends before this id."),
            Query("limit", "Batches of a page.", {**LIMIT, "maximum": 1000}),
            Query("beta", "Accepted and ignored."),
        ),
        is_anthropic=True,
        led=True,
    ),
    Route("GET", _ONE, retrieve, _KNOWN, led=True, right=Right.HOLDERS),
    keyed(
        "DELETE",
        _ONE,
        delete,
        _TAG,
        DeletedMessageBatch,
        statuses=(404,),
        is_anthropic=True,
        led=True,
    ),
    Route(
        "POST", "/v1/messages/batches/{id}/cancel", cancel, _KNOWN, led=True, right=Right.HOLDERS
    ),
    keyed(
        "GET",
        "/v1/messages/batches/{id}/results",
        show_results,
        _TAG,
        Media(("application/x-jsonl",)),
        statuses=(404,),
        is_anthropic=True,
    ),
)
