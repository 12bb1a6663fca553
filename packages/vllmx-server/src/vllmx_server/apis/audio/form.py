"""The multipart body of a transcription."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any, BinaryIO

from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.records import Record
from vllmx_engine.speech.transcriber import SpeechTask

from vllmx_server.errors import BodyTooLargeError
from vllmx_server.generating.fields import field_error
from vllmx_server.http.multipart import Multipart, body_size, receive
from vllmx_server.http.operation import Form
from vllmx_server.limits.admission import HeldBody

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
_MOST_TEMPERATURE = 2.0
_SEGMENTS = ("srt", "vtt", "verbose_json")


class SpeechForm(Record):
    """The fields of a request."""

    model: str | None
    data: bytes
    task: SpeechTask
    response_format: str = "json"
    stream: bool = False
    priority: int | None = None
    cache_salt: str | None = None


class _Upload(Multipart):
    """A body whose file stays in memory."""

    content: io.BytesIO | None = None

    def open_file(self) -> BinaryIO:
        self.content = _Kept()
        return self.content

    def too_large(self) -> BodyTooLargeError:
        return _too_large(self._max_bytes)


class _Kept(io.BytesIO):
    def close(self) -> None:
        """Keeps what was written."""


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the file is larger than {limit} bytes: split it, or raise --max-audio-bytes", param="file"
    )


async def read_form(
    request: Request, max_bytes: int, timeout_s: float, held: HeldBody, *, translates: bool
) -> SpeechForm:
    """Reads a body. Raises InvalidRequestError, MediaTypeError, BodyTooLargeError,
    BodyTimeoutError, and OverloadedError when too many bytes of files are in memory."""
    if body_size(request, max_bytes) is None:
        raise _too_large(max_bytes)
    upload = _Upload(request.headers.get("content-type", ""), max_bytes)

    async def feed(piece: Callable[[], None]) -> None:
        before = upload.num_bytes
        await asyncio.to_thread(piece)
        held.grow(upload.num_bytes - before)

    await receive(request, upload, max_bytes, timeout_s, feed)
    assert upload.content is not None, "a body without a file was refused"
    return form_of(upload.fields, upload.content.getvalue(), translates=translates)


def form_of(fields: dict[str, str], data: bytes, *, translates: bool) -> SpeechForm:
    """Checks the fields. Raises InvalidRequestError."""
    known = FIELDS_OF_TRANSLATION if translates else FIELDS
    for name in fields:
        if name not in known:
            raise InvalidRequestError(f"unknown field {shown(name)}: remove it", param=name)
    wanted = fields.get("response_format", "json")
    if wanted not in FORMATS:
        raise field_error("response_format", f"is {shown(wanted)}: use one of {', '.join(FORMATS)}")
    stream = _flag(fields, "stream")
    if stream and wanted not in ("json", "text"):
        raise field_error("stream", f"goes with json and text alone, not with {wanted}")
    for granularity in fields.get("timestamp_granularities[]", "segment").split("\n"):
        if granularity != "segment":
            raise field_error(
                "timestamp_granularities[]", f"is {shown(granularity)}: only segment is served"
            )
    task = SpeechTask(
        language=fields.get("language") or None,
        translates=translates,
        prompt=fields.get("prompt", ""),
        timestamps=wanted in _SEGMENTS,
        temperature=_temperature(fields.get("temperature", "0")),
    )
    return SpeechForm(fields.get("model"), data, task, wanted, stream)


def _flag(fields: dict[str, str], name: str) -> bool:
    value = fields.get(name, "false").lower()
    if value not in ("true", "false"):
        raise field_error(name, f"must be true or false, got {shown(value)}")
    return value == "true"


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= _MOST_TEMPERATURE:
        raise field_error(
            "temperature", f"must be between 0 and {_MOST_TEMPERATURE:g}, got {shown(text)}"
        )
    return value


_TEXT = {"type": "string"}
FIELDS_OF_TRANSLATION: dict[str, dict[str, Any]] = {
    "file": {"contentMediaType": "application/octet-stream"},
    "model": _TEXT,
    "prompt": _TEXT,
    "response_format": {"enum": list(FORMATS)},
    "temperature": {"type": "number", "minimum": 0, "maximum": _MOST_TEMPERATURE},
}
FIELDS: dict[str, dict[str, Any]] = {
    **FIELDS_OF_TRANSLATION,
    "language": _TEXT,
    "stream": {"type": "boolean"},
    "timestamp_granularities[]": {"type": "array", "items": {"enum": ["segment"]}},
}
TRANSCRIPTION = Form(FIELDS, ("file",))
TRANSLATION = Form(FIELDS_OF_TRANSLATION, ("file",))
