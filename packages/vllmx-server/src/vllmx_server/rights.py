"""Rights: who may use which route; a route that is not listed here answers nobody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any

from starlette.requests import Request

from vllmx_server.errors import ForbiddenError
from vllmx_server.routes.admin import admin

Endpoint = Callable[[Request], Awaitable[Any]]


class Right(Enum):
    """The key that a route wants of a server with keys; without any, the first two are the same."""

    EVERYBODY = "no key is needed"
    HOLDERS = "any key opens it"
    OPERATORS = "a key of --admin-key opens it, or one with `admin` in the file of keys"


_LISTED = {
    Right.EVERYBODY: """
        GET /
        GET /web/{name:path}
        GET /docs
        GET /docs/{name}
        GET /ping
        POST /ping
        GET /health
        GET /health/live
        GET /health/ready
    """,
    Right.HOLDERS: """
        POST /v1/chat/completions
        POST /v1/completions
        POST /v1/messages
        POST /v1/messages/count_tokens
        POST /v1/messages/batches
        GET /v1/messages/batches
        GET /v1/messages/batches/{id}
        DELETE /v1/messages/batches/{id}
        POST /v1/messages/batches/{id}/cancel
        GET /v1/messages/batches/{id}/results
        POST /v1/embeddings
        POST /v1/rerank
        POST /v2/rerank
        POST /rerank
        POST /embed
        POST /v1/score
        POST /score
        POST /classify
        POST /pooling
        POST /v1/responses
        POST /v1/responses/input_tokens
        POST /v1/responses/compact
        GET /v1/responses/{id}
        DELETE /v1/responses/{id}
        POST /v1/responses/{id}/cancel
        GET /v1/responses/{id}/input_items
        POST /v1/conversations
        GET /v1/conversations/{id}
        POST /v1/conversations/{id}
        DELETE /v1/conversations/{id}
        POST /v1/conversations/{id}/items
        GET /v1/conversations/{id}/items
        GET /v1/conversations/{id}/items/{item}
        DELETE /v1/conversations/{id}/items/{item}
        POST /v1/files
        GET /v1/files
        GET /v1/files/{id}
        DELETE /v1/files/{id}
        GET /v1/files/{id}/content
        POST /v1/batches
        GET /v1/batches
        GET /v1/batches/{id}
        POST /v1/batches/{id}/cancel
        GET /v1/models
        GET /v1/models/{name:path}
        POST /tokenize
        POST /detokenize
        POST /invocations
        GET /tokenizer_info
        GET /metrics
        GET /version
        GET /openapi.json
        GET /v1/usage
    """,
    Right.OPERATORS: """
        POST /v1/models/load
        POST /v1/models/unload
        POST /sleep
        POST /wake
        POST /reset_prefix_cache
        POST /shutdown
    """,
}
RIGHTS: Mapping[tuple[str, str], Right] = {
    (method, path): right
    for right, lines in _LISTED.items()
    for method, path in map(str.split, lines.strip().splitlines())
}
"""The rights by method and path, as `vllmx_server.app` has them."""


def entitled(method: str, path: str, endpoint: Endpoint) -> Endpoint:
    """The endpoint of a route, for those who may use it."""
    right = RIGHTS.get((method, path))
    if right is None:
        return _denied
    return admin(endpoint) if right is Right.OPERATORS else endpoint


async def _denied(request: Request) -> Any:
    """What a route answers that nobody has listed."""
    raise ForbiddenError("nobody may use this route: vllmx_server.rights does not list it")
