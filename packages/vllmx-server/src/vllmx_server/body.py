"""Reading a request body within its limits of type, size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from vllmx_server.config import ServerConfig
from vllmx_server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError

_LINGER_S = 2.0
_LINGER_BYTES = 64 << 20


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole JSON body.

    Raises:
        MediaTypeError: it is compressed, or not declared as JSON. Browsers send only other types
            to foreign servers unasked, so no web page can use a server on its visitor's machine.
        BodyTooLargeError: it is over `max_body_bytes`.
        BodyTimeoutError: it took over `body_timeout_s`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError(
            f"the body has the content type {media_type[:100]!r}: send JSON with the header"
            " 'Content-Type: application/json'"
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(
            f"the body has the content encoding {encoding[:100]!r}: send it uncompressed"
        )
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(request, config.max_body_bytes)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within {config.body_timeout_s:g} s: send it faster, or raise"
            " --body-timeout-s"
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > limit
    chunks, size = [], 0
    if not too_large:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                too_large = True
                break
            chunks.append(chunk)
    if too_large:
        chunks.clear()
        if request.scope["http_version"] == "2":
            await _linger(request)
        raise BodyTooLargeError(
            f"the body is larger than {limit} bytes: shorten the request, or raise --max-body-bytes"
        )
    return b"".join(chunks)


async def _linger(request: Request) -> None:
    """Reads on for a moment, dropping everything: hypercorn's HTTP/2 breaks a connection whose body
    has not ended when its answer is sent."""
    rest = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while rest < _LINGER_BYTES:
                message = await request.receive()
                rest += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        pass
