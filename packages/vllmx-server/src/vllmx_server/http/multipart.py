"""Bodies of multipart/form-data (RFC 7578), which are fed in pieces."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import BinaryIO

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it quotes what clients send
_MAX_PARTS = 16
_MAX_NAME = 255
_MAX_FIELD = 4 << 10
_OVERHEAD = 64 << 10
"""The bytes of a body over its file: boundaries, headers, fields."""
_CHUNK = 256 << 10
"""The bytes that are handed to a thread at a time."""
_SLOWEST = 64 << 10
"""Bytes a second that a client must send after `body_timeout_s`."""


class Multipart(ABC):
    """The parts of one body; one of them is a file. Methods raise InvalidRequestError for a body
    that is broken.

    Attributes:
        fields: by name; those whose name ends with [] may come several times, one value a line.
        name: of the file; None where none came.
        num_bytes: of the file.
    """

    def __init__(self, content_type: str, max_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._content: BinaryIO | None = None
        self._header = self._value = self._disposition = b""
        self._field: str | None = None
        """The plain field that is being read; None: the file."""
        self._text = b""
        self._num_parts = 0
        self._has_ended = False
        self._parser = MultipartParser(
            _boundary(content_type),
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise InvalidRequestError(f"the multipart body is broken: {error}") from None

    def finish(self) -> None:
        """Checks that the body is complete."""
        if not self._has_ended:
            raise InvalidRequestError("the multipart body lacks its closing boundary")
        if self.name is None:
            raise InvalidRequestError("the body has no part named 'file'", param="file")

    @abstractmethod
    def open_file(self) -> BinaryIO:
        """Opens what the file is written to; it is closed when all of it has come."""

    @abstractmethod
    def too_large(self) -> BodyTooLargeError:
        """The error for a file over `max_bytes`."""

    def _part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequestError(f"the multipart body has more than {_MAX_PARTS} parts")
        self._disposition = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")[:_MAX_NAME]
        if not name:
            raise InvalidRequestError("a part of the multipart body has no name")
        if name == "file":
            if self.name is not None:
                raise InvalidRequestError("one file is taken at a time", param="file")
            self.name = file_name(options.get(b"filename", b"").decode(errors="replace"))
            self._field, self._content = None, self.open_file()
        elif b"filename" in options:
            raise InvalidRequestError(
                f"{name!r} is not a file field of this route: use 'file'", param=name
            )
        elif name in self.fields and not name.endswith("[]"):
            raise InvalidRequestError(f"the field {name!r} is given twice", param=name)
        else:
            self._field, self._text = name, b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._text += data[start:end]
            if len(self._text) > _MAX_FIELD:
                raise InvalidRequestError(
                    f"the field {self._field!r} is longer than {_MAX_FIELD} bytes",
                    param=self._field,
                )
            return
        assert self._content is not None
        self.num_bytes += end - start
        if self.num_bytes > self._max_bytes:
            raise self.too_large()
        self._content.write(memoryview(data)[start:end])

    def _part_end(self) -> None:
        if self._field is None:
            assert self._content is not None
            self._content.close()
            return
        try:
            before = f"{self.fields[self._field]}\n" if self._field in self.fields else ""
            self.fields[self._field] = before + self._text.decode()
        except UnicodeDecodeError:
            raise InvalidRequestError(
                f"the field {self._field!r} is not UTF-8", param=self._field
            ) from None

    def _end(self) -> None:
        self._has_ended = True


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    found = options.get(b"boundary")
    if kind != b"multipart/form-data" or not found:
        raise InvalidRequestError(
            f"the body has the content type {shown(content_type)}: send multipart/form-data with"
            " a boundary"
        )
    if len(found) > 70 or not found.isascii():  # RFC 2046
        raise InvalidRequestError("the boundary of a multipart body has at most 70 characters")
    return found


def file_name(given: str) -> str:
    """A client's name of a file, as it is shown: without folders and what cannot be printed. No
    file is ever opened by it."""
    last = given.replace("\\", "/").rpartition("/")[2]
    shown = "".join(c for c in last if c.isprintable()).strip(". ")
    return shown[:_MAX_NAME] or "file"


OnThread = Callable[[Callable[[], None]], Awaitable[None]]


async def receive(
    request: Request, upload: Multipart, max_bytes: int, timeout_s: float, on_thread: OnThread
) -> None:
    """Feeds a request's body to `upload`; its file may have so many bytes. Raises
    InvalidRequestError, MediaTypeError, BodyTooLargeError, BodyTimeoutError."""
    limit, size, held = max_bytes + _OVERHEAD, 0, bytearray()
    begun_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(timeout_s) as timer:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise upload.too_large()
                timer.reschedule(begun_s + timeout_s + size / _SLOWEST)
                held += chunk
                if len(held) >= _CHUNK:
                    data, held = bytes(held), bytearray()
                    await on_thread(partial(upload.feed, data))
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within {timeout_s:g} s and a second for each {_SLOWEST}"
            " bytes: send it faster, or raise --body-timeout-s"
        ) from None
    await on_thread(partial(upload.feed, bytes(held)))
    upload.finish()


def body_size(request: Request, max_bytes: int) -> int | None:
    """The declared bytes of a body that may be taken, `max_bytes` where it declares none; None: it
    is too large. Raises MediaTypeError for a compressed one."""
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise MediaTypeError("the body is compressed: send it as it is")
    limit, declared = max_bytes + _OVERHEAD, request.headers.get("content-length", "")
    size = min(int(declared), limit + 1) if declared.isdigit() else max_bytes
    return size if size <= limit else None
