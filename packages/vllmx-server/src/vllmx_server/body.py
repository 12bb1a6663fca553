"""Reading a request body within its limit."""

from __future__ import annotations

from starlette.requests import Request

from vllmx_server.errors import BodyTooLargeError


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to be over `limit` bytes,
    without reading the rest."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is larger than {limit} bytes: shorten the request, or raise --max-body-bytes"
    )
