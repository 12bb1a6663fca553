"""A file that a client sends as multipart/form-data, written to disk as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError

from vllmx_server.apis.batches.files import Files
from vllmx_server.apis.batches.multipart import MultipartReader, Sink
from vllmx_server.config import ServerConfig
from vllmx_server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError

_MAX_FIELD = 4 << 10
_OVERHEAD = 64 << 10
"""The bytes of a body over its file: boundaries, headers, fields."""
_CHUNK = 256 << 10
"""The bytes that are handed to a thread at a time."""
_SLOWEST = 64 << 10
"""Bytes a second that a client must send after `body_timeout_s`."""


class Upload:
    """The parts of one body.

    Attributes:
        fields: by name.
        name: of the file; None where none came.
        num_bytes: of the file.
        content: what it is written to, once its part has begun.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self.content: BinaryIO | None = None

    def close(self) -> None:
        """Deletes the file, unless it was moved."""
        if self.content is not None:
            self.content.close()
        self.path.unlink(missing_ok=True)

    def open_part(self, name: str, file: str | None) -> Sink:
        """The sink for the content of a part. Raises InvalidRequestError."""
        if file is None and name != "file":
            if name in self.fields:
                raise InvalidRequestError(f"the field {name!r} is given twice", param=name)
            return _Field(self, name)
        if name != "file":
            raise InvalidRequestError(f"{name!r} is no file of this route: use 'file'", param=name)
        if self.name is not None:
            raise InvalidRequestError("one file is taken at a time", param="file")
        self.name = file or "file"
        return _File(self, self._max_bytes)


class _Field:
    def __init__(self, upload: Upload, name: str) -> None:
        self._upload = upload
        self._name = name
        self._data = b""

    def write(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > _MAX_FIELD:
            raise InvalidRequestError(
                f"the field {self._name!r} is longer than {_MAX_FIELD} bytes", param=self._name
            )

    def end(self) -> None:
        try:
            self._upload.fields[self._name] = self._data.decode()
        except UnicodeDecodeError:
            raise InvalidRequestError(
                f"the field {self._name!r} is not UTF-8", param=self._name
            ) from None


class _File:
    def __init__(self, upload: Upload, max_bytes: int) -> None:
        self._upload = upload
        self._max_bytes = max_bytes
        self._content = upload.content = upload.path.open("xb")

    def write(self, data: bytes) -> None:
        self._upload.num_bytes += len(data)
        if self._upload.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._content.write(data)

    def end(self) -> None:
        self._content.close()


def too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the file is larger than {limit} bytes: split it, or raise --max-file-bytes"
    )


@contextlib.asynccontextmanager
async def uploaded(
    request: Request, config: ServerConfig, files: Files, owner: str
) -> AsyncIterator[Upload]:
    """The parts of a request's body; the file is deleted at the end, unless it was moved.

    Raises InvalidRequestError, MediaTypeError, BodyTooLargeError, BodyTimeoutError,
    StorageFullError, StorageError.
    """
    content_type = request.headers.get("content-type", "")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise MediaTypeError("the body is compressed: send it as it is")
    limit = config.max_file_bytes
    declared = request.headers.get("content-length", "")
    size = min(int(declared), limit + _OVERHEAD + 1) if declared.isdigit() else limit
    if size > limit + _OVERHEAD:
        raise too_large(limit)
    path = await files.on_thread(files.new_path)
    upload = Upload(path, limit)
    reader = MultipartReader(content_type, upload.open_part)
    await files.take(owner, size)
    try:
        await _receive(request, reader, files, config.body_timeout_s, limit + _OVERHEAD)
        if upload.name is None:
            raise InvalidRequestError("the body has no part named 'file'", param="file")
        yield upload
    finally:
        files.give_back(owner, size)
        await files.on_thread(upload.close)


async def _receive(
    request: Request, reader: MultipartReader, files: Files, timeout_s: float, limit: int
) -> None:
    size, held = 0, bytearray()
    begun_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(timeout_s) as timer:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large(limit - _OVERHEAD)
                timer.reschedule(begun_s + timeout_s + size / _SLOWEST)
                held += chunk
                if len(held) >= _CHUNK:
                    data, held = bytes(held), bytearray()
                    await files.on_thread(partial(reader.feed, data))
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within {timeout_s:g} s and a second for each {_SLOWEST}"
            " bytes: send it faster, or raise --body-timeout-s"
        ) from None
    await files.on_thread(partial(reader.feed, bytes(held)))
    reader.finish()
