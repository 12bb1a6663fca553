"""/v1/messages/batches: Anthropic's batches of Messages."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllmx_core.errors import InvalidRequestError

from vllmx_server.answers.message_batches import DeletedMessageBatch, MessageBatchList
from vllmx_server.batches.messages import PREFIX, PURPOSE, URL, input_lines, results, shown
from vllmx_server.body import checked, read_json
from vllmx_server.routes.batches import cancelled, check_room
from vllmx_server.routes.pages import answer, check_query, number, page
from vllmx_server.schema.message_batches import CREATE
from vllmx_server.state import ServerState, owner_of, state_of
from vllmx_server.store.batches import Batch
from vllmx_server.store.files import FileNotKnownError, StoredFile
from vllmx_server.store.ids import new_id, now

_WINDOW_S = 24 * 3600
"""The time limit of a batch, as in Anthropic's API."""


async def create(request: Request) -> Response:
    """Creates a batch of Messages."""
    state, owner = state_of(request), owner_of(request)
    state.check_admission()

    def parse(data: bytes) -> tuple[int, bytes]:
        body = checked(data, state, CREATE)
        return len(body.requests), input_lines(body.requests, state.config.max_body_bytes)

    num_requests, lines = await read_json(request, state, parse)
    check_room(state, owner)
    file = await _kept(state, owner, lines)
    created = now()
    batch = Batch(
        id=new_id(PREFIX),
        owner=owner,
        endpoint=URL,
        input_file_id=file.id,
        completion_window="24h",
        created_at=created,
        expires_at=created + _WINDOW_S,
        model=state.llm.config.name,
        num_requests=num_requests,
    )
    await state.storage.batches.save(batch)
    begun = answer(shown(batch))
    state.batches.begin(batch)
    return begun


async def _kept(state: ServerState, owner: str, lines: bytes) -> StoredFile:
    """The input file of a batch. Raises StorageFullError, StorageError."""
    files, size = state.storage.files, len(lines)
    await files.take(owner, size)
    try:
        path = await files.on_thread(files.new_path)
        await files.on_thread(partial(path.write_bytes, lines))
        lifetime_s = max(state.storage.lifetime_s, _WINDOW_S)
        file = files.new_file(owner, "requests.jsonl", PURPOSE, size, lifetime_s)
        await files.keep([(file, path)])
        return file
    finally:
        files.give_back(owner, size)


async def list_batches(request: Request) -> Response:
    """The batches of Messages of this key, the newest first."""
    check_query(request, "after_id", "before_id", "limit", "beta")
    state, query = state_of(request), request.query_params
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequestError("give after_id or before_id, not both", param="before_id")
    limit = number(request, "limit", 1, 1000, 20)
    found, has_more = await state.storage.batches.page(
        owner_of(request), after, limit, PREFIX, before
    )
    data = [shown(state.batches.newest(batch)) for batch in found]
    return page(MessageBatchList, data, has_more)


async def _found(request: Request) -> Batch:
    """The current state of the request's batch. Raises BatchNotKnownError."""
    state = state_of(request)
    name = request.path_params["id"]
    return state.batches.newest(await state.storage.batches.get(owner_of(request), name, PREFIX))


async def retrieve(request: Request) -> Response:
    """Answers with the state of a batch."""
    return answer(shown(await _found(request)))


async def cancel(request: Request) -> Response:
    """Cancels the requests of a batch that have not begun."""
    state, batch = state_of(request), await _found(request)
    if batch.status != "finalizing":  # its requests are answered
        batch = await cancelled(state, batch)
    return answer(shown(batch))


async def delete(request: Request) -> Response:
    """Deletes a batch that has ended, with its requests and results."""
    batch, storage = await _found(request), state_of(request).storage
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
    batch, files = await _found(request), state_of(request).storage.files
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
