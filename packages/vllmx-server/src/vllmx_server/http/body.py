"""Reading a request body within its limits of type, size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.requests import Request
from starlette.types import Message
from vllmx_core.errors import VllmxError, shown

from vllmx_server.config import ServerConfig
from vllmx_server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError, route_path
from vllmx_server.limits.admission import GIVEN_BODY, HeldBody

_UNTYPED = ("", "application/x-www-form-urlencoded")
"""Bodies without a type, and those of `curl -d`."""
INLINE_BYTES = 64 << 10
"""Larger bodies are decoded on a thread: so many bytes take about a millisecond."""


async def read_body(request: Request, config: ServerConfig, held: HeldBody) -> bytes:
    """The whole JSON body. A given body (`GIVEN_BODY`) is returned as it is.

    Raises:
        MediaTypeError: it is compressed, or not declared as JSON. Browsers send JSON to another
            site only after asking it, so no web page can use a server on its visitor's machine.
        BodyTooLargeError: it is over `max_body_bytes`.
        OverloadedError: too many bytes of bodies are in memory.
        BodyTimeoutError: it took over `body_timeout_s`.
    """
    given: bytes | None = request.scope["state"].get(GIVEN_BODY)
    if given is not None:
        return given
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not _is_untyped(request, media_type):
        raise MediaTypeError(
            f"the body has the content type {shown(media_type)}: send JSON with the header"
            " 'Content-Type: application/json'"
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(
            f"the body has the content encoding {shown(encoding)}: send it uncompressed"
        )
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(request, config.max_body_bytes, held)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within {config.body_timeout_s:g} s: send it faster, or raise"
            " --body-timeout-s"
        ) from None


def _is_untyped(request: Request, media_type: str) -> bool:
    """True if a program sent an undeclared body to an API that takes those. Browsers add the origin
    of the page to every POST, so no page passes for a program."""
    paths: Collection[str] = getattr(request.app.state, "untyped", ())
    if media_type not in _UNTYPED or route_path(request.scope) not in paths:
        return False
    return "origin" not in request.headers and "sec-fetch-site" not in request.headers


def unread(request: Request, data: bytes) -> Request:
    """The request as it came, with its body unread again."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            return await request.receive()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return Request(request.scope, receive)


async def _read(request: Request, limit: int, held: HeldBody) -> bytes:
    declared = request.headers.get("content-length", "")
    chunks, size = [], 0
    try:
        _check_size(int(declared) if declared.isdigit() else 0, limit)
        async for chunk in request.stream():
            size += len(chunk)
            _check_size(size, limit)
            held.grow(len(chunk))
            chunks.append(chunk)
    except VllmxError:
        chunks.clear()  # the error holds on to this frame
        raise
    return b"".join(chunks)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLargeError(
            f"the body is larger than {limit} bytes: shorten the request, or raise --max-body-bytes"
        )
