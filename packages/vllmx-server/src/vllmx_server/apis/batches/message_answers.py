"""Answers of /v1/messages/batches."""

from __future__ import annotations

from typing import Literal

from vllmx_server.schema.record import Record


class MessageBatchCounts(Record, kw_only=True):
    """All but `processing` are 0 until the batch has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Record, kw_only=True):
    """The state of a batch of Messages. Times have the form of RFC 3339."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None
    """The path of the results, once the batch has ended."""


class MessageBatchList(Record, kw_only=True):
    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(Record, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"
