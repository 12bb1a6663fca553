"""Answers about files, OpenAI's batches, and Anthropic's batches of Messages."""

from __future__ import annotations

from typing import Literal

from vllmx_server.http.answers import Page
from vllmx_server.schema.record import Record

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
"""The status of a batch."""


class FileObject(Record, kw_only=True):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class BatchError(Record):
    """One error of an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Record, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(Record, kw_only=True):
    """The state of a batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class FileList(Page, kw_only=True):
    data: list[FileObject]


class BatchList(Page, kw_only=True):
    data: list[BatchObject]


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
