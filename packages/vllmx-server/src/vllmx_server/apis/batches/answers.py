"""Answers about what is kept: files, batches, and lists of them."""

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
    """What is known of a file."""

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
    """What is wrong with an input file."""

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
    """How far a batch is."""

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
