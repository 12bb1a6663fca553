"""Bodies of multipart/form-data (RFC 7578), a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from enum import Enum
from typing import Protocol

from vllmx_core.errors import InvalidRequestError, shown

_MAX_HEADERS = 8 << 10
"""The most bytes of the headers of one part; as much may stand before the first part."""
_MAX_PARTS = 16
_MAX_NAME = 255


class Sink(Protocol):
    """Takes the content of one part."""

    def write(self, data: bytes) -> None:
        """Takes more bytes of the file."""
        ...

    def end(self) -> None:
        """Says that the part has ended."""
        ...


OpenPart = Callable[[str, str | None], Sink]
"""Called with a part's name and the name of its file, None where it is a plain field."""


class _Where(Enum):
    BEFORE = "before the first part"
    DELIMITER = "after a boundary"
    HEADERS = "in the headers of a part"
    CONTENT = "in the content of a part"
    AFTER = "after the last part"


class MultipartReader:
    """Cuts a body into its parts. `feed` and `finish` raise InvalidRequestError for a body that is
    broken, and what `open_part` and the sinks raise.

    Args:
        content_type: of the request. Raises InvalidRequestError where it has no boundary.
    """

    def __init__(self, content_type: str, open_part: OpenPart) -> None:
        self._delimiter = b"\r\n--" + _boundary(content_type)
        self._open_part = open_part
        self._held = bytearray(b"\r\n")  # so that the first boundary is one like all others
        self._where = _Where.BEFORE
        self._sink: Sink | None = None
        self._num_parts = 0

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        self._held += data
        while self._step():
            pass

    def finish(self) -> None:
        """The body has ended."""
        if self._where is not _Where.AFTER:
            raise InvalidRequestError(
                f"the multipart body ends {self._where.value}: its closing boundary is missing"
            )

    def _step(self) -> bool:
        """Whether something was done."""
        if self._where is _Where.CONTENT:
            return self._content()
        if self._where is _Where.HEADERS:
            return self._headers()
        if self._where is _Where.DELIMITER:
            return self._after_delimiter()
        if self._where is _Where.BEFORE:
            return self._preamble()
        self._held.clear()
        return False

    def _preamble(self) -> bool:
        at = self._held.find(self._delimiter)
        if at < 0:
            self._check_held("the first boundary does not come")
            return False
        del self._held[: at + len(self._delimiter)]
        self._where = _Where.DELIMITER
        return True

    def _after_delimiter(self) -> bool:
        if self._held.startswith(b"--"):
            self._where = _Where.AFTER
            return True
        at = self._held.find(b"\r\n")
        if at < 0:
            self._check_held("a boundary's line does not end")
            return False
        if self._held[:at].strip(b" \t"):
            raise InvalidRequestError("the multipart body has something behind a boundary")
        # The line's end stays: it may be the end of no headers at all.
        del self._held[:at]
        self._where = _Where.HEADERS
        return True

    def _headers(self) -> bool:
        at = self._held.find(b"\r\n\r\n")
        if at < 0:
            self._check_held("the headers of a part do not end")
            return False
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequestError(f"the multipart body has more than {_MAX_PARTS} parts")
        self._sink = self._open_part(*_disposition(bytes(self._held[2:at])))
        del self._held[: at + 4]
        self._where = _Where.CONTENT
        return True

    def _content(self) -> bool:
        assert self._sink is not None
        at = self._held.find(self._delimiter)
        if at >= 0:
            self._sink.write(bytes(self._held[:at]))
            self._sink.end()
            self._sink = None
            del self._held[: at + len(self._delimiter)]
            self._where = _Where.DELIMITER
            return True
        certain = len(self._held) - len(self._delimiter) + 1
        if certain > 0:
            self._sink.write(bytes(self._held[:certain]))
            del self._held[:certain]
        return False

    def _check_held(self, trouble: str) -> None:
        if len(self._held) > _MAX_HEADERS:
            raise InvalidRequestError(f"the multipart body is broken: {trouble}")


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = _one_line(content_type)
    found = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not found:
        raise InvalidRequestError(
            f"the body has the content type {shown(content_type)}: send multipart/form-data with"
            " a boundary"
        )
    if len(found) > 70 or not found.isascii():  # RFC 2046
        raise InvalidRequestError("the boundary of a multipart body has at most 70 characters")
    return found.encode()


def _disposition(headers: bytes) -> tuple[str, str | None]:
    """The name of a part and the name of its file."""
    for line in headers.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            break
    else:
        raise InvalidRequestError("a part of the multipart body has no Content-Disposition")
    message = Message()
    message["content-disposition"] = _one_line(value.decode("utf-8", "replace")).strip()
    name = message.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("a part of the multipart body has no name")
    has_file = message.get_param("filename", header="content-disposition") is not None
    return name[:_MAX_NAME], file_name(message.get_filename() or "") if has_file else None


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


def file_name(given: str) -> str:
    """A client's name of a file, as it is shown: without folders and what cannot be printed. No
    file is ever opened by it."""
    last = given.replace("\\", "/").rpartition("/")[2]
    shown = "".join(c for c in last if c.isprintable()).strip(". ")
    return shown[:_MAX_NAME] or "file"
