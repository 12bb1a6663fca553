"""Batches of Messages in the OpenAPI document."""

from __future__ import annotations

from vllmx_server.answers.message_batches import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
)
from vllmx_server.openapi.operation import BODY, LIMIT, Endpoint, Media, Operation, Query
from vllmx_server.routes import message_batches as routes
from vllmx_server.schema.message_batches import CreateMessageBatch

_TAG = "Batches of Messages"
_PARAMS = {"max_tokens": 16, "messages": [{"role": "user", "content": "Hello!"}]}
MESSAGE_BATCHES: dict[Endpoint, Operation] = {
    routes.create: Operation(
        _TAG,
        MessageBatch,
        CreateMessageBatch,
        statuses=BODY,
        example={"requests": [{"custom_id": "one", "params": _PARAMS}]},
        is_anthropic=True,
    ),
    routes.list_batches: Operation(
        _TAG,
        MessageBatchList,
        query=(
            Query("after_id", "The id behind which the page begins."),
            Query("before_id", "The id in front of which the page ends."),
            Query("limit", "Batches of a page.", {**LIMIT, "maximum": 1000}),
            Query("beta", "Accepted and ignored."),
        ),
        is_anthropic=True,
    ),
    routes.retrieve: Operation(_TAG, MessageBatch, statuses=(404,), is_anthropic=True),
    routes.cancel: Operation(_TAG, MessageBatch, statuses=(404,), is_anthropic=True),
    routes.delete: Operation(_TAG, DeletedMessageBatch, statuses=(404,), is_anthropic=True),
    routes.show_results: Operation(
        _TAG, Media(("application/x-jsonl",)), statuses=(404,), is_anthropic=True
    ),
}
