"""The web page: files of the package `vllmx_server/web`, which hold no secret and need no key.

They are read when somebody first asks for them and kept, packed as well. A browser asks again each
time and learns that nothing changed, so that it never mixes the files of two versions.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.errors import route_path
from vllmx_server.generating.api import Api
from vllmx_server.http.operation import PAGES, Media, Operation
from vllmx_server.http.route import Right, Route

PREFIX = "/web/"
"""The prefix of the paths of all files but the page itself, which is at "/"."""
PAGE = "index.html"
_FOLDER = Path(__file__).parents[2] / "web"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "media-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_SAFE = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self), payment=(), usb=()",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    packed: bytes
    tag: str
    media_type: str


@cache
def _names() -> frozenset[str]:
    """The names of all files, with their folder: what is not among them is not there."""
    return frozenset(
        path.relative_to(_FOLDER).as_posix()
        for path in _FOLDER.rglob("*")
        if path.suffix.removeprefix(".") in _TYPES
    )


@cache
def _file(name: str) -> _File:
    body = (_FOLDER / name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    packed = zlib.compress(body, 9, wbits=31)  # with the header of gzip
    return _File(body, packed, tag, _TYPES[name.rpartition(".")[2]])


async def page(request: Request) -> Response:
    """A page to chat with the model."""
    if route_path(request.scope) != "/":  # the router overlooks a line's end behind the path
        raise HTTPException(404, "Not Found")
    return _answer(request, PAGE)


async def file(request: Request) -> Response:
    """A file of that page."""
    name: str = request.path_params["name"]
    if name not in _names() or name == PAGE:
        raise HTTPException(404, "Not Found")
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    found = _file(name)
    headers = {**_SAFE, "etag": found.tag, "cache-control": "no-cache", "vary": "Accept-Encoding"}
    if _has_tag(request.headers.get("if-none-match", ""), found.tag):
        return Response(None, 304, headers=headers)
    body = found.body
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        body, headers["content-encoding"] = found.packed, "gzip"
    headers["content-length"] = str(len(body))
    is_head = request.method == "HEAD"
    return Response(b"" if is_head else body, headers=headers, media_type=found.media_type)


def _has_tag(given: str, tag: str) -> bool:
    tags = [one.strip().removeprefix("W/") for one in given.split(",")]
    return tag in tags or tags == ["*"]


def _takes_gzip(given: str) -> bool:
    """A browser's list, in which gzip has no weight of 0."""
    for one in given.lower().split(","):
        coding, _, weight = one.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


_KNOWN = {304: None}


class WebApi(Api):
    routes = (
        Route(
            "GET",
            "/",
            page,
            Operation(PAGES, Media(("text/html",)), statuses=(404,), answers=_KNOWN),
            Right.EVERYBODY,
        ),
        Route(
            "GET",
            PREFIX + "{name:path}",
            file,
            Operation(
                PAGES,
                Media(("text/css", "text/javascript", "image/svg+xml", "text/plain", "text/html")),
                statuses=(404,),
                answers=_KNOWN,
            ),
            Right.EVERYBODY,
        ),
    )
