"""/v1/batches."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import QueueFullError

from vllmx_server.apis.batches.answers import BatchList, BatchObject
from vllmx_server.apis.batches.file_routes import TAG
from vllmx_server.apis.batches.runner import KeptFiles, kept_of
from vllmx_server.apis.batches.schema import CREATE, CreateBatch
from vllmx_server.apis.batches.store import PREFIX, Batch
from vllmx_server.errors import OverloadedError
from vllmx_server.generating.api import keyed
from vllmx_server.generating.reading import checked, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import owner_of
from vllmx_server.http.operation import AFTER, BODY, LIMIT, Query
from vllmx_server.http.pages import answer, check_query, number, page
from vllmx_server.store.database import new_id, now

MAX_OPEN = 100
"""Batches of one key that are worked on."""


async def create(request: Request) -> Response:
    """Begins a batch."""
    served, owner = served_of(request), owner_of(request)
    served.check_admission()
    body = await read_json(request, served, partial(checked, served=served, decoder=CREATE))
    kept = kept_of(request)
    await kept.files.get(owner, body.input_file_id)
    check_room(kept, owner)
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
        model=served.llm.config.name,
    )
    await kept.batches.save(batch)
    shown = answer(batch.shown())
    kept.runner.begin(batch)
    return shown


def check_room(kept: KeptFiles, owner: str) -> None:
    """Raises QueueFullError where a key has as many batches as it may."""
    if kept.runner.num_open(owner) >= MAX_OPEN:
        raise QueueFullError(
            f"{MAX_OPEN} batches of this key are being worked on, no more are taken: wait for one,"
            " or cancel it",
            retry_after_s=60,
        )


async def list_batches(request: Request) -> Response:
    """The batches of this key, the newest first."""
    check_query(request, "after", "limit")
    kept, after = kept_of(request), request.query_params.get("after")
    limit = number(request, "limit", 1, 100, 20)
    found, has_more = await kept.batches.page(owner_of(request), after, limit)
    return page(BatchList, [kept.runner.newest(batch).shown() for batch in found], has_more)


async def found_batch(request: Request, prefix: str = PREFIX) -> Batch:
    """The current state of the request's batch. Raises BatchNotKnownError."""
    kept = kept_of(request)
    batch = await kept.batches.get(owner_of(request), request.path_params["id"], prefix)
    return kept.runner.newest(batch)


async def retrieve(request: Request) -> Response:
    """Answers how far a batch is."""
    return answer((await found_batch(request)).shown())


async def cancel(request: Request) -> Response:
    """Answers no further line of one."""
    batch = await found_batch(request)
    return answer((await cancelled(served_of(request), batch)).shown())


async def cancelled(served: Served, batch: Batch) -> Batch:
    """Cancels a batch. Raises OverloadedError while the server drains."""
    if served.admission.draining:
        raise OverloadedError("the server is shutting down: cancel the batch at the next one")
    return await served.store(KeptFiles).runner.cancel(batch)


ROUTES = (
    keyed(
        "POST",
        "/v1/batches",
        create,
        TAG,
        BatchObject,
        CreateBatch,
        statuses=(*BODY, 404),
        example={"input_file_id": "file-0123", "endpoint": "/v1/chat/completions"},
        led=True,
    ),
    keyed(
        "GET",
        "/v1/batches",
        list_batches,
        TAG,
        BatchList,
        query=(AFTER, Query("limit", "Batches of a page.", {**LIMIT, "maximum": 100})),
        led=True,
    ),
    keyed("GET", "/v1/batches/{id}", retrieve, TAG, BatchObject, statuses=(404,), led=True),
    keyed("POST", "/v1/batches/{id}/cancel", cancel, TAG, BatchObject, statuses=(404,), led=True),
)
