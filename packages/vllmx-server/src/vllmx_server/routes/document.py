"""GET /openapi.json, and /docs: a page that shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.state import state_of

PREFIX = "/docs"
_FOLDER = Path(__file__).parent.parent / "openapi" / "page"
_FILES = {"page.css": "text/css", "page.js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "cache-control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether a path is the page's or one of its files', which hold no secret and need no key."""
    return path == PREFIX or path.removeprefix(PREFIX + "/") in _FILES


async def document(request: Request) -> Response:
    """What all routes take and answer, as OpenAPI 3.1, with the bounds of this server."""
    state = state_of(request)
    if state.document is None:
        from vllmx_server.openapi.document import encoded  # most servers are never asked
        from vllmx_server.openapi.served import Served

        served = Served.by(state)
        state.document = await asyncio.to_thread(encoded, request.app.routes, served)
    return Response(state.document, media_type="application/json")


async def page(request: Request) -> Response:
    """A page that shows `/openapi.json`."""
    return await _sent("index.html", "text/html")


async def file(request: Request) -> Response:
    """The script and the style of the page."""
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404)
    return await _sent(name, _FILES[name])


async def _sent(name: str, media_type: str) -> Response:
    data = await asyncio.to_thread((_FOLDER / name).read_bytes)
    return Response(data, headers=_HEADERS, media_type=media_type)
