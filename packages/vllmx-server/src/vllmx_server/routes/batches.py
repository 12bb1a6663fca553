"""/v1/batches."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import QueueFullError

from vllmx_server.answers.kept import BatchList
from vllmx_server.body import checked, read_json
from vllmx_server.errors import OverloadedError
from vllmx_server.routes.pages import answer, check_query, number, page
from vllmx_server.schema.batches import CREATE
from vllmx_server.state import ServerState, owner_of, state_of
from vllmx_server.store.batches import Batch
from vllmx_server.store.ids import new_id, now

MAX_OPEN = 100
"""Batches of one key that are worked on."""


async def create(request: Request) -> Response:
    """Begins a batch."""
    state, owner = state_of(request), owner_of(request)
    state.check_admission()
    body = await read_json(request, state, partial(checked, state=state, decoder=CREATE))
    await state.storage.files.get(owner, body.input_file_id)
    check_room(state, owner)
    created, expiry = now(), body.output_expires_after
    batch = Batch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=created,
        expires_at=created + body.window_s,
        metadata=body.metadata,
        output_lifetime_s=None if expiry is None else expiry.seconds,
        model=state.llm.config.name,
    )
    await state.storage.batches.save(batch)
    shown = answer(batch.shown())
    state.batches.begin(batch)
    return shown


def check_room(state: ServerState, owner: str) -> None:
    """Raises QueueFullError where a key has as many batches as it may."""
    if state.batches.num_open(owner) >= MAX_OPEN:
        raise QueueFullError(
            f"{MAX_OPEN} batches of this key are being worked on, no more are taken: wait for one,"
            " or cancel it",
            retry_after_s=60,
        )


async def list_batches(request: Request) -> Response:
    """The batches of this key, the newest first."""
    check_query(request, "after", "limit")
    state, after = state_of(request), request.query_params.get("after")
    limit = number(request, "limit", 1, 100, 20)
    found, has_more = await state.storage.batches.page(owner_of(request), after, limit)
    return page(BatchList, [state.batches.newest(batch).shown() for batch in found], has_more)


async def retrieve(request: Request) -> Response:
    """Answers how far a batch is."""
    state = state_of(request)
    found = await state.storage.batches.get(owner_of(request), request.path_params["id"])
    return answer(state.batches.newest(found).shown())


async def cancel(request: Request) -> Response:
    """Answers no further line of one."""
    state = state_of(request)
    found = await state.storage.batches.get(owner_of(request), request.path_params["id"])
    return answer((await cancelled(state, found)).shown())


async def cancelled(state: ServerState, batch: Batch) -> Batch:
    """Cancels a batch. Raises OverloadedError while the server drains."""
    if state.draining:
        raise OverloadedError("the server is shutting down: cancel the batch at the next one")
    return await state.batches.cancel(batch)
