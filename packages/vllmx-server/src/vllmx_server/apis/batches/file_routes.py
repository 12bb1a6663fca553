"""/v1/files."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from vllmx_core.bounds import MAX_LIFETIME_S
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.apis.batches.answers import FileList, FileObject
from vllmx_server.apis.batches.files import Files, StoredFile
from vllmx_server.apis.batches.runner import kept_of
from vllmx_server.config import ServerConfig
from vllmx_server.errors import BodyTooLargeError
from vllmx_server.generating.api import keyed
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.served import served_of
from vllmx_server.http.answers import Deleted
from vllmx_server.http.client import owner_of
from vllmx_server.http.hosts import check_origin
from vllmx_server.http.multipart import Multipart, body_size, receive
from vllmx_server.http.operation import AFTER, BODY, LIMIT, ORDER, Form, Media, Query
from vllmx_server.http.pages import answer, check_query, newest_first, number, page

PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


async def upload(request: Request) -> Response:
    """Keeps the file of a multipart body."""
    served, owner = served_of(request), owner_of(request)
    check_origin(request, served.config.allowed_origins)
    served.check_admission()
    files = kept_of(request).files
    async with uploaded(request, served.config, files, owner) as found:
        lifetime_s = _lifetime(found.fields)
        kept = files.new_file(
            owner, found.name or "", found.fields["purpose"], found.num_bytes, lifetime_s
        )
        await files.keep([(kept, found.path)])
    return answer(kept.shown())


def _lifetime(fields: dict[str, str]) -> int | None:
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequestError(f"unknown field {shown(name)}: remove it", param=name)
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        raise field_error("purpose", f"is {shown(purpose or '')}: use one of {', '.join(PURPOSES)}")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise field_error("expires_after[anchor]", "must be created_at")
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10) or not (
        1 <= int(seconds) <= MAX_LIFETIME_S
    ):
        raise field_error(
            "expires_after[seconds]",
            f"must be between 1 and {MAX_LIFETIME_S}, got {shown(seconds)}",
        )
    return int(seconds)


async def list_files(request: Request) -> Response:
    """The files of this key."""
    check_query(request, "purpose", "limit", "order", "after")
    query = request.query_params
    found, has_more = await kept_of(request).files.page(
        owner_of(request),
        query.get("purpose"),
        query.get("after"),
        number(request, "limit", 1, 10_000, 10_000),
        newest_first(request),
    )
    return page(FileList, [each.shown() for each in found], has_more)


async def _found(request: Request) -> StoredFile:
    """The request's file. Raises FileNotKnownError."""
    return await kept_of(request).files.get(owner_of(request), request.path_params["id"])


async def retrieve(request: Request) -> Response:
    """Answers what is known of a file."""
    return answer((await _found(request)).shown())


async def content(request: Request) -> Response:
    """The bytes of a file."""
    found, files = await _found(request), kept_of(request).files
    return FileResponse(
        files.path(found.id), media_type="application/octet-stream", filename=found.name
    )


async def delete(request: Request) -> Response:
    """Forgets one, unless a batch needs it."""
    found, kept = await _found(request), kept_of(request)
    batch = kept.runner.reader_of(found.id)
    if batch is not None:
        raise InvalidRequestError(
            f"file {found.id} is the input of batch {batch.id}, which is {batch.status}: cancel it"
            " first"
        )
    await kept.files.delete(found.id)
    return answer(Deleted(id=found.id, object="file"))


TAG = "Files and batches"
_ONE = "/v1/files/{id}"
_LINE = (
    '{"custom_id": "one", "method": "POST", "url": "/v1/chat/completions",'
    ' "body": {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}}'
)
_FORM = Form(
    {
        "file": {"contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 1, "maximum": MAX_LIFETIME_S},
    },
    ("file", "purpose"),
)
ROUTES = (
    keyed(
        "POST",
        "/v1/files",
        upload,
        TAG,
        FileObject,
        _FORM,
        statuses=BODY,
        example={"file": _LINE, "purpose": "batch"},
    ),
    keyed(
        "GET",
        "/v1/files",
        list_files,
        TAG,
        FileList,
        query=(
            Query("purpose", "Those of one purpose."),
            Query("limit", "Files of a page.", {**LIMIT, "maximum": 10_000}),
            ORDER,
            AFTER,
        ),
    ),
    keyed("GET", _ONE, retrieve, TAG, FileObject, statuses=(404,)),
    keyed("DELETE", _ONE, delete, TAG, Deleted, statuses=(404,), led=True),
    keyed(
        "GET",
        "/v1/files/{id}/content",
        content,
        TAG,
        Media(("application/octet-stream",)),
        statuses=(404,),
    ),
)


class Upload(Multipart):
    """A body whose file is written to `path`."""

    def __init__(self, content_type: str, path: Path, max_bytes: int) -> None:
        super().__init__(content_type, max_bytes)
        self.path = path

    def open_file(self) -> BinaryIO:
        return self.path.open("xb")

    def too_large(self) -> BodyTooLargeError:
        return too_large(self._max_bytes)

    def close(self) -> None:
        """Deletes the file, unless it was moved."""
        if self._content is not None:
            self._content.close()
        self.path.unlink(missing_ok=True)


def too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the file is larger than {limit} bytes: split it, or raise --max-file-bytes"
    )


@contextlib.asynccontextmanager
async def uploaded(
    request: Request, config: ServerConfig, files: Files, owner: str
) -> AsyncIterator[Upload]:
    """The parts of a request's body; the file is deleted at the end, unless it was moved. Raises
    InvalidRequestError, MediaTypeError, BodyTooLargeError, BodyTimeoutError, StorageFullError,
    StorageError."""
    limit = config.max_file_bytes
    if (size := body_size(request, limit)) is None:
        raise too_large(limit)
    path = await files.on_thread(files.new_path)
    upload = Upload(request.headers.get("content-type", ""), path, limit)
    await files.take(owner, size)
    try:
        await receive(request, upload, limit, config.body_timeout_s, files.on_thread)
        yield upload
    finally:
        files.give_back(owner, size)
        await files.on_thread(upload.close)
