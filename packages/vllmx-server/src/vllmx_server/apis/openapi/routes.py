"""GET /openapi.json, and /docs: a page that shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.operation import PAGES, Media, Operation
from vllmx_server.http.route import Right, Route
from vllmx_server.schema.record import encode

PREFIX = "/docs"
_FOLDER = Path(__file__).parent / "page"
_FILES = {"page.css": "text/css", "page.js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "cache-control": "no-cache",
}


class Document:
    """The document, once somebody has asked for it."""

    json: bytes | None = None


async def document(request: Request) -> Response:
    """The OpenAPI 3.1 document of all routes, with the bounds of this server."""
    served = served_of(request)
    known = served.store(Document)
    if known.json is None:
        from vllmx_server.apis.openapi import document as made  # most servers are never asked
        from vllmx_server.apis.openapi.schemas import Bounds

        bounds = Bounds.of(served)
        known.json = await asyncio.to_thread(lambda: encode(made.document(served.routes, bounds)))
    return Response(known.json, media_type="application/json")


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


class DocumentApi(Api):
    routes = (
        keyed("GET", "/openapi.json", document, PAGES, Media(("application/json",))),
        Route("GET", PREFIX, page, Operation(PAGES, Media(("text/html",))), Right.EVERYBODY),
        Route(
            "GET",
            PREFIX + "/{name}",
            file,
            Operation(PAGES, Media(("text/css", "text/javascript")), statuses=(404,)),
            Right.EVERYBODY,
            names=tuple(_FILES),
        ),
    )

    def start(self, served: Served) -> None:
        served.stores[Document] = Document()
