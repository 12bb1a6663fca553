"""The source of an image or an audio: a data URL, or another one that the operator allows."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.records import Record
from vllmx_core.system.deadline import Deadline, DeadlineError
from vllmx_core.system.files import open_regular

from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.wire.images import PLURAL, SINGULAR, Kind

if TYPE_CHECKING:
    from http.client import HTTPResponse

FETCH_S = 20.0
"""Seconds for fetching a file in all: resolver, connection, TLS, headers, body and redirects."""
_MAX_REDIRECTS = 3
_CHUNK_BYTES = 64 << 10
_MAX_HEADER = 1000
"""The characters before a data URL's comma, which are the names of a media type."""
_MAX_URL = 16 << 10
"""The characters of any other URL: `urlsplit` keeps those that it has seen."""
_ESCAPED = {b"%2B": b"+", b"%2F": b"/", b"%3D": b"=", b"%0A": b"", b"%0D": b"", b"%20": b""}
"""Escapes that URL builders write for signs of base64 and for its line ends."""
_REDIRECTS = (301, 302, 303, 307, 308)


_FORM = {"image": "png", "audio": "wav", "video": "mp4"}


class ImageSource(Record):
    """An image, an audio or a video that a message names."""

    url: str
    where: str
    """The place in the request, for messages to users."""
    kind: Kind = "image"

    @property
    def example(self) -> str:
        """The beginning of a data URL."""
        return f"data:{self.kind}/{_FORM[self.kind]};base64,..."

    @property
    def is_inline(self) -> bool:
        """True if the URL holds the bytes, so that there is nothing to wait for."""
        return self.url[:5].lower() == "data:"

    @property
    def host(self) -> str:
        """The host to fetch from; empty: this machine."""
        return "" if self.is_inline else _split(self).hostname or ""


def check_source(source: ImageSource, limits: ImageLimits) -> None:
    """Refuses what is not allowed, before anything is read. Raises InvalidRequestError."""
    if source.is_inline:
        limits.check_bytes(len(source.url) * 3 // 4 - 100, source.where)  # a header is shorter
        return
    parts = _split(source)
    if parts.scheme == "file":
        _allowed_path(parts, source, limits)
    elif parts.scheme in ("http", "https"):
        _check_host(parts, source, limits)
    else:
        raise InvalidRequestError(
            f"{source.where} has the URL {shown(source.url)}: send the {source.kind} in a data"
            f" URL, {source.example}",
            param=source.where,
        )


def read_source(
    source: ImageSource, limits: ImageLimits, deadline: Deadline | None = None
) -> bytes:
    """The file as it is stored. May wait for a server: not for an event loop.

    Raises:
        InvalidRequestError: not readable within `deadline` (None: `FETCH_S` from now), not allowed,
            or too large.
    """
    check_source(source, limits)
    if source.is_inline:
        return _decoded(source, limits)
    parts = _split(source)
    if parts.scheme == "file":
        return _read_file(_allowed_path(parts, source, limits), source, limits)
    return _fetch(parts, source, limits, deadline or Deadline(FETCH_S))


def _split(source: ImageSource) -> SplitResult:
    if len(source.url) > _MAX_URL:
        raise _wrong(
            source,
            f"has a URL of more than {_MAX_URL} characters: send the {source.kind} in a data URL,"
            f" {source.example}",
        )
    try:
        parts = urlsplit(source.url)
        _ = parts.port
    except ValueError:
        raise _wrong(source, "has a URL that cannot be read: check it") from None
    return parts


def _wrong(source: ImageSource, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{source.where} {what}", param=source.where)


def _decoded(source: ImageSource, limits: ImageLimits) -> bytes:
    header, comma, data = source.url[5:].partition(",")
    parts = header.split(";") if len(header) <= _MAX_HEADER else [""]
    media, *options = (part.strip().lower() for part in parts)
    expected = media == "" or media.startswith(f"{source.kind}/")
    if not comma or "base64" not in options or not expected:
        raise _wrong(
            source, f"must be a data URL of {SINGULAR[source.kind]} in base64: {source.example}"
        )
    try:
        found = _of_base64(data)
    except ValueError:
        raise _wrong(source, "holds base64 that cannot be decoded: encode it again") from None
    limits.check_bytes(len(found), source.where)
    return found


def _of_base64(text: str) -> bytes:
    """Decodes base64, also in lines or escaped as a part of a URL. Raises ValueError."""
    data = text.encode("ascii")
    if b"%" in data:
        for code, sign in _ESCAPED.items():
            data = data.replace(code, sign).replace(code.lower(), sign)
    return base64.b64decode(data.translate(None, b" \t\r\n"), validate=True)


# --- files ----------------------------------------------------------------------------------------
def _allowed_path(parts: SplitResult, source: ImageSource, limits: ImageLimits) -> Path:
    """The file, with all links resolved."""
    if limits.folder is None:
        raise _wrong(
            source,
            "names a file of this machine, which is not allowed here: send the"
            f" {source.kind} in a data URL, or start the server with --allowed-local-media-path",
        )
    try:
        path = Path(unquote(parts.path)).resolve()
    except (OSError, ValueError, RuntimeError):
        raise _wrong(source, "names a file that cannot be read") from None
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(limits.folder):
        raise _wrong(source, "names a file outside of --allowed-local-media-path")
    return path


def _read_file(path: Path, source: ImageSource, limits: ImageLimits) -> bytes:
    try:
        with open_regular(path) as file:
            limits.check_bytes(os.fstat(file.fileno()).st_size, source.where)
            data = file.read(limits.max_bytes + 1)
    except OSError:
        raise _wrong(source, "names a file that cannot be read") from None
    limits.check_bytes(len(data), source.where)
    return data


# --- servers --------------------------------------------------------------------------------------
def _check_host(parts: SplitResult, source: ImageSource, limits: ImageLimits) -> None:
    host = (parts.hostname or "").rstrip(".")
    ports = limits.hosts.get(host)
    if ports is None:
        raise _wrong(
            source,
            f"is on {shown(host)}, from where {PLURAL[source.kind]} are not fetched here: send the"
            f" {source.kind} in a data URL, or start the server with --allowed-media-domains",
        )
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if port not in ports:
        raise _wrong(
            source,
            f"is on port {port} of {shown(host)}, from where {PLURAL[source.kind]} are not fetched"
            f" here: send the {source.kind} in a data URL, or start the server with"
            f" --allowed-media-domains {host}:{port}",
        )


def _fetch(
    parts: SplitResult, source: ImageSource, limits: ImageLimits, deadline: Deadline
) -> bytes:
    """Follows redirects to allowed hosts alone."""
    import http.client  # most starts need neither it nor ssl, which take some ms

    from vllmx_core.system.deadline_http import DeadlineConnection

    for _ in range(_MAX_REDIRECTS + 1):
        _check_host(parts, source, limits)
        connection = DeadlineConnection(
            parts.hostname or "", parts.port, deadline, secure=parts.scheme == "https"
        )
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"User-Agent": "vllmx", "Accept": f"{source.kind}/*"}
            connection.request("GET", target, headers=headers)
            with connection.getresponse() as answer:
                if answer.status == 200:
                    return _body(answer, source, limits)
                if answer.status not in _REDIRECTS:
                    raise _wrong(source, f"cannot be fetched: its server says {answer.status}")
                place = answer.getheader("Location", "")
            parts = _split(ImageSource(urljoin(parts.geturl(), place), source.where))
            if parts.scheme not in ("http", "https"):
                raise _wrong(source, "cannot be fetched: its server leads elsewhere")
        except InvalidRequestError:
            raise
        except DeadlineError:
            raise _wrong(source, f"cannot be fetched within {deadline.seconds:g} s") from None
        except (OSError, http.client.HTTPException, ValueError):
            raise _wrong(source, "cannot be fetched: its server does not answer") from None
        finally:
            connection.close()
    raise _wrong(source, f"cannot be fetched: more than {_MAX_REDIRECTS} redirects")


def _body(answer: HTTPResponse, source: ImageSource, limits: ImageLimits) -> bytes:
    limits.check_bytes(answer.length or 0, source.where)
    body = bytearray()  # a server may send each byte as a chunk
    while chunk := answer.read1(_CHUNK_BYTES):
        body += chunk
        limits.check_bytes(len(body), source.where)
    if answer.length:
        raise _wrong(source, "cannot be fetched: its server broke off")
    return bytes(body)
